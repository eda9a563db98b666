// What the recurrence of kernels.cu asks of the machine, in PTX for compute capability 9.0a.
//
// kernels.cu itself holds no assembly, so that a test can give it these functions on a CPU.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

extern __shared__ __align__(128) unsigned char shared_memory[];

__device__ __forceinline__ u32 shared_start() { return (u32)__cvta_generic_to_shared(shared_memory); }

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Shared memory of this block.

__device__ __forceinline__ void store_word(u32 address, u32 word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void store_pair(u32 address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}

__device__ __forceinline__ void load_pair(u32 address, float& first, float& second) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(address) : "memory");
}

// Stores into the shared memory of another block of the cluster, at the address that this block has for it.

__device__ __forceinline__ u32 address_at(u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ __forceinline__ void store_pair_at(u32 remote, float first, float second) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(first), "f"(second) : "memory");
}

// The first half of a barrier of all threads of the cluster, and the second one. Without `publish` it says only that a
// thread has come to this point, and doesn't wait until what it has written is there.
template <bool PUBLISH>
__device__ __forceinline__ void cluster_arrive() {
  if (PUBLISH) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  } else {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Of the two warps, one of each warpgroup, that have the same rows.
__device__ __forceinline__ void warps_barrier(u32 warp) {
  asm volatile("barrier.sync.aligned %0, 64;" ::"r"(warp + 1) : "memory");
}

// What ordinary stores have written to shared memory becomes visible to the tensor cores.
__device__ __forceinline__ void publish_to_tensor_cores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// What blocks hand to one another goes through the L2 cache.

__device__ __forceinline__ void load_fresh(u32 (&words)[4], const u32* pointer) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(pointer)
               : "memory");
}

__device__ __forceinline__ void store_fresh(u32* pointer, u32 word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(pointer), "r"(word) : "memory");
}

__device__ __forceinline__ void store_fresh(u32* pointer, u32 word0, u32 word1, u32 word2, u32 word3) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(word0), "r"(word1),
               "r"(word2), "r"(word3)
               : "memory");
}

// With COUNT blocks of a group tell one another through a counter that only grows.
__device__ __forceinline__ void count_arrival(u32* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ u32 arrivals(const u32* counter) {
  u32 seen;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  return seen;
}

// What this thread has read and written comes before what it reads and writes after, for all blocks.
__device__ __forceinline__ void order_fresh() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Where a thread waits for others. That lasts microseconds: after some 20 seconds an error is better.
__device__ __forceinline__ void wait_longer(u64& since) {
  u64 now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now));
  if (since == 0) since = now;
  if (now - since > 40000000000ull) asm volatile("trap;");
}

// What nobody else on this multiprocessor needs.

__device__ __forceinline__ uint2 load_once(const uint2* pointer) { return __ldcs(pointer); }
__device__ __forceinline__ u16 load_once(const u16* pointer) { return __ldcs(pointer); }

// Two numbers in 16 bits, the first one below.

__device__ __forceinline__ u32 pack(float first, float second) {
  u32 word;
#if BFLOAT
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
#endif
  return word;
}

__device__ __forceinline__ void unpack(u32 word, float& first, float& second) {
#if BFLOAT
  first = __uint_as_float(word << 16);
  second = __uint_as_float(word & 0xffff0000u);
#else
  asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;}"
      : "=f"(first), "=f"(second)
      : "r"(word));
#endif
}

__device__ __forceinline__ float exponential(float x) { return __expf(x); }
__device__ __forceinline__ float quotient(float x, float y) { return __fdividef(x, y); }

// Products of a warpgroup, which run while the threads do other things. multiply() itself is generated.

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until so many of the latest commits at most are still running.
template <int COMMITS>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COMMITS) : "memory");
}
