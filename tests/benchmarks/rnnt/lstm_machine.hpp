// The machine that benchmarks/rnnt/ops/lstm/kernels.cu runs on, on a CPU: what primitives.cu asks of a GPU in PTX. Each
// thread of the grid is a coroutine; products read operands from where the PTX ISA says that wgmma has them. It shows
// whether the source computes what it should, not whether its accesses are ordered.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
using std::max;
using std::min;

struct uint2 {
  u32 x, y;
};
struct uint4 {
  u32 x, y, z, w;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

constexpr u32 SHARED_START = 1024;
constexpr int MACHINE_THREADS = 256;
constexpr size_t STACK = 65536;

struct Meeting {
  int count = 0, generation = 0;
};

struct Block {
  std::vector<unsigned char> shared;
  Meeting all, warps[8], groups[2], pairs[4];
  u32 slots[8][32];
  u32 left[2][128][4];
};

struct Cluster {
  Meeting all;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  int thread, block, phase;
  bool done;
};

struct Index {
  int x;
};

static std::vector<Thread> machine_threads;
static std::vector<Block> machine_blocks;
static std::vector<Cluster> machine_clusters;
static Thread* machine_now;
static ucontext_t machine_scheduler;
static std::function<void()> machine_body;
static bool machine_stuck;

#define threadIdx (Index{machine_now->thread})
#define blockIdx (Index{machine_now->block})
#define gridDim (Index{(int)machine_blocks.size()})

inline void machine_yield() { swapcontext(&machine_now->context, &machine_scheduler); }

inline Block& machine_block() { return machine_blocks[machine_now->block]; }

inline void machine_meet(Meeting& meeting, int expected) {
  int generation = meeting.generation;
  if (++meeting.count == expected) {
    meeting.count = 0;
    ++meeting.generation;
    return;
  }
  while (meeting.generation == generation) machine_yield();
}

inline void __syncthreads() { machine_meet(machine_block().all, MACHINE_THREADS); }
inline void __syncwarp() { machine_meet(machine_block().warps[threadIdx.x / 32], 32); }

template <typename F>
inline u32 machine_warp(u32 value, F combine) {
  u32* slots = machine_block().slots[threadIdx.x / 32];
  slots[threadIdx.x % 32] = value;
  __syncwarp();
  u32 result = combine(slots);
  __syncwarp();
  return result;
}

inline int __reduce_max_sync(u32, int value) {
  return (int)machine_warp((u32)value, [](u32* slots) {
    int most = (int)slots[0];
    for (int lane = 1; lane < 32; ++lane) most = max(most, (int)slots[lane]);
    return (u32)most;
  });
}

inline bool __any_sync(u32, bool value) {
  return machine_warp(value, [](u32* slots) { return (u32)std::any_of(slots, slots + 32, [](u32 x) { return x; }); });
}

inline float __uint_as_float(u32 word) {
  float value;
  memcpy(&value, &word, 4);
  return value;
}
inline u32 machine_word(float value) {
  u32 word;
  memcpy(&word, &value, 4);
  return word;
}
inline float __int_as_float(int word) { return __uint_as_float((u32)word); }
inline int __float_as_int(float value) { return (int)machine_word(value); }

inline u32 __shfl_sync(u32, u32 value, int lane) {
  return machine_warp(value, [lane](u32* slots) { return slots[lane]; });
}
inline float __shfl_xor_sync(u32, float value, int distance) {
  int lane = threadIdx.x % 32 ^ distance;
  return __uint_as_float(machine_warp(machine_word(value), [lane](u32* slots) { return slots[lane]; }));
}

inline u32 cluster_rank() { return machine_now->block % CLUSTER; }
// A block's own addresses hold its rank, too.
inline u32 shared_start() { return SHARED_START | cluster_rank() << 24; }
inline unsigned char* machine_shared(int block, u32 address, size_t bytes) {
  if (address >> 24 != (u32)(block % CLUSTER)) abort();
  address &= 0xffffff;
  if (address < SHARED_START || address - SHARED_START + bytes > machine_blocks[block].shared.size()) abort();
  return machine_blocks[block].shared.data() + (address - SHARED_START);
}
inline void store_word(u32 address, u32 word) { memcpy(machine_shared(machine_now->block, address, 4), &word, 4); }
inline void machine_store_pair(int block, u32 address, float first, float second) {
  if (address % 8) abort();
  float pair[2] = {first, second};
  memcpy(machine_shared(block, address, 8), pair, 8);
}
inline void store_pair(u32 address, float first, float second) {
  machine_store_pair(machine_now->block, address, first, second);
}
inline void load_pair(u32 address, float& first, float& second) {
  float pair[2];
  memcpy(pair, machine_shared(machine_now->block, address, 8), 8);
  first = pair[0];
  second = pair[1];
}
inline u32 address_at(u32 address, u32 rank) { return (address & 0xffffff) | rank << 24; }
inline void store_pair_at(u32 remote, float first, float second) {
  machine_store_pair(machine_now->block / CLUSTER * CLUSTER + (int)(remote >> 24), remote, first, second);
}
template <bool PUBLISH>
inline void cluster_arrive() {
  Meeting& meeting = machine_clusters[machine_now->block / CLUSTER].all;
  machine_now->phase = meeting.generation;
  if (++meeting.count == CLUSTER * MACHINE_THREADS) {
    meeting.count = 0;
    ++meeting.generation;
  }
}
inline void cluster_wait() {
  Meeting& meeting = machine_clusters[machine_now->block / CLUSTER].all;
  while (meeting.generation == machine_now->phase) machine_yield();
}
inline void warps_barrier(u32 warp) { machine_meet(machine_block().pairs[warp], 64); }
inline void publish_to_tensor_cores() {}

inline void count_arrival(u32* counter) { ++*counter; }
inline u32 arrivals(const u32* counter) { return *(const volatile u32*)counter; }
inline void order_fresh() {}

// Words that stay missing would be waited for without end.
inline void wait_longer(u64& since) {
  machine_stuck |= ++since > 2000;
  machine_yield();
}
inline void load_fresh(u32 (&words)[4], const u32* pointer) { memcpy(words, pointer, 16); }
inline void store_fresh(u32* pointer, u32 word) { *pointer = word; }
inline void store_fresh(u32* pointer, u32 word0, u32 word1, u32 word2, u32 word3) {
  u32 words[4] = {word0, word1, word2, word3};
  memcpy(pointer, words, 16);
}
template <typename T>
inline T load_once(const T* pointer) {
  return *pointer;
}

inline float machine_wide(u16 bits) {
#if BFLOAT
  return __uint_as_float((u32)bits << 16);
#else
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float size = exponent == 31  ? (fraction ? NAN : INFINITY)
               : exponent == 0 ? std::ldexp((float)fraction, -24)
                               : std::ldexp((float)(1024 + fraction), exponent - 25);
  return bits >> 15 ? -size : size;
#endif
}

inline u16 machine_narrow(float value) {
#if BFLOAT
  u32 word = machine_word(value);
  return std::isnan(value) ? 0x7fff : (u16)((word + 0x7fff + (word >> 16 & 1)) >> 16);
#else
  u16 sign = std::signbit(value) ? 0x8000 : 0;
  float size = std::fabs(value);
  if (std::isnan(value)) return 0x7fff;
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
  int steps = (int)std::nearbyint(std::ldexp(size, 10 - exponent));  // 2048 carries into the exponent
  return sign | (u16)(steps + (exponent == -14 ? 0 : (exponent + 14) << 10));
#endif
}

inline u32 pack(float first, float second) { return machine_narrow(first) | (u32)machine_narrow(second) << 16; }
inline void unpack(u32 word, float& first, float& second) {
  first = machine_wide((u16)word);
  second = machine_wide((u16)(word >> 16));
}
inline float exponential(float x) { return std::exp(x); }
inline float quotient(float x, float y) { return x / y; }

inline void products_begin() {}
inline void products_commit() {}
template <int COMMITS>
inline void products_wait() {}

// wgmma m64nNk16: the left operand in registers, the right one in shared memory without swizzling, K-major.
template <int COUNT>
inline void multiply(float (&sums)[COUNT], u32 left0, u32 left1, u32 left2, u32 left3, u64 right, int add) {
  Block& block = machine_block();
  int group = threadIdx.x / 128, own = threadIdx.x % 128, first = own / 4 * 4, quad = own % 4;
  u32 words[4] = {left0, left1, left2, left3};
  memcpy(block.left[group][own], words, 16);
  machine_meet(block.groups[group], 128);
  if (right >> 46) abort();  // no swizzling, no offset
  u32 start = (u32)(right & 0x3fff) << 4 | cluster_rank() << 24, leading = (u32)(right >> 16 & 0x3fff) << 4;
  u32 stride = (u32)(right >> 32 & 0x3fff) << 4;
  float lines[2][16];
  for (int other = 0; other < 4; ++other) {
    for (int word = 0; word < 4; ++word) {
      int k = 2 * other + word / 2 * 8;
      unpack(block.left[group][first + other][word], lines[word % 2][k], lines[word % 2][k + 1]);
    }
  }
  for (int sum = 0; sum < COUNT; ++sum) {
    int row = sum / 2 % 2, column = sum / 4 * 8 + 2 * quad + sum % 2;
    float total = add ? sums[sum] : 0.0f;
    for (int k = 0; k < 16; ++k) {
      u16 value;
      u32 address = start + k / 8 * leading + column / 8 * stride + column % 8 * 16 + k % 8 * 2;
      memcpy(&value, machine_shared(machine_now->block, address, 2), 2);
      total += lines[row][k] * machine_wide(value);
    }
    sums[sum] = total;
  }
  machine_meet(block.groups[group], 128);
}

static void machine_start() {
  machine_body();
  machine_now->done = true;
  machine_yield();
}

// Run a grid, some blocks of which lag behind others for a while, and whose shared memory holds what looks like NaN at first. Returns whether all threads have ended.
inline bool machine_run(int blocks, int shared_bytes, std::function<void()> body) {
  machine_body = body;
  machine_stuck = false;
  machine_blocks = std::vector<Block>(blocks);
  machine_clusters = std::vector<Cluster>(blocks / CLUSTER);
  for (Block& block : machine_blocks) block.shared.assign(shared_bytes, 0xff);
  machine_threads = std::vector<Thread>((size_t)blocks * MACHINE_THREADS);
  for (size_t index = 0; index < machine_threads.size(); ++index) {
    Thread& thread = machine_threads[index];
    thread.stack.reset(new char[STACK]);
    thread.thread = (int)(index % MACHINE_THREADS);
    thread.block = (int)(index / MACHINE_THREADS);
    thread.done = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK;
    makecontext(&thread.context, machine_start, 0);
  }
  u32 random = 1, turn = 0;
  for (size_t left = machine_threads.size(); left > 0 && !machine_stuck;) {
    for (Thread& thread : machine_threads) {
      if (thread.thread == 0) turn = (random = random * 1664525 + 1013904223) >> 30;
      if (thread.done || turn == 0) continue;
      machine_now = &thread;
      swapcontext(&machine_scheduler, &thread.context);
      left -= thread.done;
    }
  }
  return !machine_stuck;
}
