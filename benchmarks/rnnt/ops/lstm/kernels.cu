// The recurrence of an LSTM, all frames in one persistent kernel; forward, and with BACKWARD its way back.
//
// Rows of the batch are divided into groups, which know nothing of one another. The blocks of a group divide the units
// of the state, and each keeps its part of W_hh in shared memory for all frames. A frame is a product of (rows, K) and
// (K, columns): forward K are the H units before, and columns the four gates of the block's units; backward K are the
// 4 H gates' gradients of the frame behind, and columns the block's units. The blocks of a cluster divide K: each does
// a part of K for the columns of all of them, and gives the others their sums through shared memory, so that each block
// reads K / CLUSTER of each row from the L2 cache, which is what limits a frame. Two warpgroups divide a block's K once
// more.
//
// What a block has made of a frame the others of its group read from `fresh`. How they know that it is there is WAIT:
//  COUNT  all blocks of the group have arrived at a counter.
//  LOAD   nothing but the words themselves says so: a word that hasn't been written is MISSING, two NaN that arithmetic
//         never gives. A warp loads all until it is there, at once if it is. Four buffers take turns. When a thread has
//         what the others have made of a frame, they have read what it had made of the frame before; so it makes that
//         MISSING again, and a fence in the next frame puts this before the next word that it writes, after which the
//         others may load from that place again.
// The result is the same.
//
// Gates lie unit by unit: gate j of unit u in column 4 u + j. Rows are best sorted by length: groups end early,
// and warps whose 16 rows have ended read nothing.
//
// Layouts. A product takes 64 rows, 16 for each warp; in the 16 x 16 parts of the left matrix that the tensor cores
// take, thread (g, q) of a warp, lane 4 g + q, has rows g and g + 8 and columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9, in
// four words: row g, row g + 8, and the same of the last two columns. What blocks hand to one another, `fresh`, lies
// in this order: for each 16 rows and each 16 of K the 16 bytes of each lane, so that a load gives a thread its four
// words. The order of K is free, if both matrices have the same one, and is that in which a thread comes by its
// results: of each 16 units forward word 2 q + p, 8 kh is unit 4 (2 kh + p) + q; of each 32 gates backward it is gate
// 8 q + 4 s + 2 kh + p of part s. The right matrix is permuted likewise when it is loaded. It lies in blocks of 8
// columns (of the result) x 8 of K, 128 bytes each, as the tensor cores want it without swizzling: blocks of
// neighbouring columns follow one another, and then those of the next 8 of K. Of the result thread (g, q) has rows g
// and g + 8 and columns 8 i + 2 q and 8 i + 2 q + 1.
//
// The warpgroups divide what they do with the result: forward one has rows g and the other one rows g + 8, and columns
// are ordered so that a thread has all gates of units 4 i + q; backward both have all rows, and units 8 i + 2 q and
// 8 i + 2 q + 1.
//
// Macros: HIDDEN H, UNITS of a block, CLUSTER, GROUP_BLOCKS, ROWS of a group, TILES = ROWS / 64 rounded up, DEPTH
// chunks of 32 columns of K that are loaded ahead, WAIT (LOAD needs DEPTH = CHUNKS), BFLOAT, BACKWARD.

#define COUNT 0
#define LOAD 1

#if BACKWARD
constexpr int K_ALL = 4 * HIDDEN;
constexpr int OWN = UNITS;
#else
constexpr int K_ALL = HIDDEN;
constexpr int OWN = 4 * UNITS;
#endif
constexpr int K_BLOCK = K_ALL / CLUSTER;
constexpr int COLUMNS = OWN * CLUSTER;
constexpr int CHUNKS = K_BLOCK / 64;  // of 32 columns of K, of a warpgroup
constexpr int SUMS = OWN / 8;  // pairs of sums that a thread ends with
constexpr int THREADS = 256;
constexpr int BUFFERS = 4;
constexpr u32 MISSING = 0xffffffff;
constexpr int OTHERS = 2 * CLUSTER - 1;  // warpgroups that a warpgroup gets sums from
constexpr u32 WEIGHT_BYTES = COLUMNS * K_BLOCK * 2;
constexpr u32 SUM_BYTES = SUMS * 128 * 8;  // of a warpgroup for another

static_assert(K_ALL % (64 * CLUSTER) == 0 && DEPTH <= CHUNKS, "K has to be divisible");
static_assert(WAIT != LOAD || DEPTH == CHUNKS, "all of it at a time");
static_assert(UNITS % 8 == 0 && COLUMNS <= 256, "columns of one instruction");

// Where a thread stands.
struct Place {
  u32 thread;     // of the warpgroup
  u32 warpgroup;  // 0 or 1
  u32 warp;       // of the warpgroup
  u32 row;        // g
  u32 quad;       // q
  u32 rank;       // in the cluster
  u32 memory;     // where shared memory starts
  int first_unit;
};

// The rows g and g + 8 of a warp.
struct Rows {
  int index[2];   // in the batch
  int length[2];  // their frames, 0 of rows that aren't there
  bool there[2];
};

__device__ __forceinline__ float sigmoid(float x) { return quotient(1.0f, 1.0f + exponential(-x)); }
__device__ __forceinline__ float hyperbolic(float x) { return 1.0f - quotient(2.0f, 1.0f + exponential(2.0f * x)); }

__device__ __forceinline__ Rows rows_of(const Place& at, int tile, int start, int end, const int* lengths, int frames) {
  Rows rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int local = tile * 64 + at.warp * 16 + at.row + 8 * half;
    rows.index[half] = start + local;
    rows.there[half] = local < ROWS && start + local < end;
    rows.length[half] = rows.there[half] ? min(max(lengths[start + local], 0), frames) : 0;
  }
  return rows;
}

// Frames of the longest row of each tile, and of the 16 rows of the warp.
__device__ __forceinline__ void longest_of(int (&ends)[TILES], int (&warp_ends)[TILES], const Rows (&rows)[TILES],
                                           const Place& at) {
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    warp_ends[tile] = __reduce_max_sync(0xffffffffu, max(rows[tile].length[0], rows[tile].length[1]));
    u32 scratch = at.memory + (tile * 4 + at.warp) * 8;
    if (at.warpgroup == 0 && at.thread % 32 == 0) store_pair(scratch, __int_as_float(warp_ends[tile]), 0.0f);
  }
  __syncthreads();
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    ends[tile] = 0;
    for (int warp = 0; warp < 4; ++warp) {
      float word, zero;
      load_pair(at.memory + (tile * 4 + warp) * 8, word, zero);
      ends[tile] = max(ends[tile], __float_as_int(word));
    }
  }
  __syncthreads();
}

// This block's part of W_hh, forward (4 H, H), backward its transpose (H, 4 H), into shared memory.
__device__ __forceinline__ void load_weights(const Place& at, const u16* weights, int cluster_unit) {
  constexpr int VECTORS = K_BLOCK / 8;
  for (int index = threadIdx.x; index < COLUMNS * VECTORS; index += THREADS) {
    int column = index / VECTORS, vector = index % VECTORS;
#if BACKWARD
    int unit = cluster_unit + column, line = unit;
#else
    int unit = cluster_unit + column / 16 * 4 + column % 8 / 2;
    int line = unit * 4 + column / 8 % 2 * 2 + column % 2;
#endif
    uint4 words = make_uint4(0, 0, 0, 0);
    if (unit < HIDDEN) words = *(const uint4*)(weights + (u64)line * K_ALL + at.rank * K_BLOCK + vector * 8);
    u32 target = at.memory + column / 8 * 128 + column % 8 * 16;
#if BACKWARD
    target += vector / 4 * (COLUMNS * 64) + vector % 4 * 4;
    store_word(target, words.x);
    store_word(target + COLUMNS * 16, words.y);
    store_word(target + COLUMNS * 32, words.z);
    store_word(target + COLUMNS * 48, words.w);
#else
    target += vector * (COLUMNS * 16);
    store_word(target, (words.x & 0xffff) | (words.z << 16));
    store_word(target + 4, (words.x >> 16) | (words.z & 0xffff0000));
    store_word(target + 8, (words.y & 0xffff) | (words.w << 16));
    store_word(target + 12, (words.y >> 16) | (words.w & 0xffff0000));
#endif
  }
  publish_to_tensor_cores();
}

constexpr int ROWS_WORDS = K_ALL / 16 * 128;  // of 16 rows in `fresh`

// What a thread has of the left matrix: the next DEPTH chunks of 32 columns, in turn.
struct Left {
  u32 words[DEPTH][2][4];
  const u32* source;  // of the thread
  bool any;  // whether one of the warp's rows goes on
};

// Where a warp's 16 rows of a frame lie.
__device__ __forceinline__ u32* fresh_rows(u32* fresh, const Place& at, int frame, int group, int groups, int tile) {
  return fresh + (u64)((((frame + BUFFERS) % BUFFERS) * groups + group) * TILES * 4 + tile * 4 + at.warp) * ROWS_WORDS;
}

// Where none of a warp's rows goes on all lanes read the same 16 bytes; nobody sees what comes of them. A branch around
// the loads would make the products wait for all of them.
__device__ __forceinline__ void point_at(Left& left, const Place& at, bool any, const u32* source) {
  left.source = source + (at.rank * (K_BLOCK / 16) + at.warpgroup * (K_BLOCK / 32)) * 128;
  left.source += any ? at.thread % 32 * 4 : 0;
  left.any = any;
}

__device__ __forceinline__ void load_chunk(Left& left, int chunk) {
  load_fresh(left.words[chunk % DEPTH][0], left.source + chunk * 256);
  load_fresh(left.words[chunk % DEPTH][1], left.source + chunk * 256 + 128);
}

__device__ __forceinline__ void load_first(Left& left) {
#pragma unroll
  for (int chunk = 0; chunk < DEPTH; ++chunk) load_chunk(left, chunk);
  __syncwarp();  // keeps the compiler from putting loads off until they are needed
}

// The largest word of what is loaded, which is MISSING if one of them is.
__device__ __forceinline__ u32 largest_of(const Left& left) {
  u32 largest = 0;
#pragma unroll
  for (int chunk = 0; chunk < DEPTH; ++chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int word = 0; word < 4; ++word) largest = max(largest, left.words[chunk][half][word]);
    }
  }
  return largest;
}

// Load the first chunks once they are there; with LOAD all of them.
__device__ __forceinline__ void begin(Left& left, const u32* counter, int rounds) {
#if WAIT == COUNT
  u64 since = 0;
  while (threadIdx.x % 32 == 0 && arrivals(counter) < (u32)rounds * GROUP_BLOCKS) wait_longer(since);
  __syncwarp();
  load_first(left);
#else
  u64 since = 0;
  for (;;) {
    load_first(left);
    if (!left.any || !__any_sync(0xffffffffu, largest_of(left) == MISSING)) break;
    wait_longer(since);
  }
#endif
}

// The warpgroup's part of K; the first chunks have been loaded.
__device__ __forceinline__ void multiply_loaded(float (&sums)[COLUMNS / 2], Left& left, const Place& at) {
  // without swizzling, 128 bytes from 8 columns to the next 8, 16 COLUMNS bytes from 8 of K to the next 8
  // (an address says in its upper bits which block of the cluster it is of: not here)
  u64 start = ((at.memory + at.warpgroup * (WEIGHT_BYTES / 2)) & 0x3ffff) >> 4;
  u64 right = start | ((u64)COLUMNS << 16) | ((u64)(128 >> 4) << 32);
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    u32(&words)[2][4] = left.words[chunk % DEPTH];
    products_begin();  // for each chunk, so that it need not wait for those behind it
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int part = chunk * 2 + half;
      multiply(sums, words[half][0], words[half][1], words[half][2], words[half][3],
               right + (u64)(part * 2 * COLUMNS), part != 0);
    }
    products_commit();
    if (chunk > 0 && chunk - 1 + DEPTH < CHUNKS) {
      products_wait<1>();
      load_chunk(left, chunk - 1 + DEPTH);
    }
  }
  if (WAIT == LOAD) order_fresh();  // while the products run
  products_wait<0>();
}

// The warpgroup's part of K. `any`: whether one of the warp's rows goes on; source: its 16 rows; rounds: of arrivals
// that it takes until they are there.
__device__ __forceinline__ void multiply_all(float (&sums)[COLUMNS / 2], const Place& at, bool any, const u32* source,
                                             const u32* counter, int rounds) {
  if (CLUSTER > 1) cluster_arrive<false>();  // what others have sent before has been used
  Left left;
  point_at(left, at, any, source);
  begin(left, counter, rounds);
  multiply_loaded(sums, left, at);
}

// What this block has made of a frame is there.
__device__ __forceinline__ void arrive(u32* counter) {
#if WAIT == COUNT
  __syncthreads();
  if (threadIdx.x == 0) count_arrival(counter);
#endif
}

// Which of a thread's four sums in 8 columns are those of a warpgroup.
__device__ __forceinline__ constexpr int sum_of(int half, int which) {
  return BACKWARD ? 2 * which + half : 2 * half + which;
}

// Sums of all warpgroups of the cluster, of the columns of this block and of this warpgroup's half of the result.
__device__ __forceinline__ void reduce(float (&own)[SUMS][2], const float (&sums)[COLUMNS / 2], const Place& at) {
  u32 buffers = at.memory + WEIGHT_BYTES;
  u32 source = at.rank * 2 + at.warpgroup;
  if (CLUSTER > 1) {
    cluster_wait();  // until all have read the sums before
  } else {
    warps_barrier(at.warp);
  }
#pragma unroll
  for (int block = 0; block < CLUSTER; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 target = block * 2 + half;
      if (source == target) {
#pragma unroll
        for (int sum = 0; sum < SUMS; ++sum) {
          own[sum][0] = sums[(block * SUMS + sum) * 4 + sum_of(half, 0)];
          own[sum][1] = sums[(block * SUMS + sum) * 4 + sum_of(half, 1)];
        }
      } else {
        u32 slot = source > target ? source - 1 : source;
        u32 address = buffers + (half * OTHERS + slot) * SUM_BYTES + at.thread * 8;
        if (CLUSTER > 1) address = address_at(address, block);
#pragma unroll
        for (int sum = 0; sum < SUMS; ++sum) {
          float first = sums[(block * SUMS + sum) * 4 + sum_of(half, 0)];
          float second = sums[(block * SUMS + sum) * 4 + sum_of(half, 1)];
          if (CLUSTER > 1) {
            store_pair_at(address + sum * 1024, first, second);
          } else {
            store_pair(address + sum * 1024, first, second);
          }
        }
      }
    }
  }
  if (CLUSTER > 1) {
    cluster_arrive<true>();
    cluster_wait();
  } else {
    warps_barrier(at.warp);
  }
#pragma unroll
  for (int slot = 0; slot < OTHERS; ++slot) {
    u32 address = buffers + (at.warpgroup * OTHERS + slot) * SUM_BYTES + at.thread * 8;
#pragma unroll
    for (int sum = 0; sum < SUMS; ++sum) {
      float first, second;
      load_pair(address + sum * 1024, first, second);
      own[sum][0] += first;
      own[sum][1] += second;
    }
  }
}

__device__ __forceinline__ Place place_of(int block) {
  Place at;
  at.thread = threadIdx.x % 128;
  at.warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // so that the compiler knows it as uniform
  at.warp = __shfl_sync(0xffffffffu, at.thread / 32, 0);
  at.row = at.thread % 32 / 4;
  at.quad = at.thread % 4;
  at.rank = CLUSTER > 1 ? cluster_rank() : 0;
  at.memory = shared_start();
  at.first_unit = block * UNITS;
  return at;
}

// Forward, where in its 16 rows of `fresh` a thread has units 8 pair + q and 8 pair + q + 4 of its block.
__device__ __forceinline__ u32 word_of_units(const Place& at, int pair) {
  int eight = at.first_unit / 8 + pair;
  return eight / 2 * 128 + at.thread % 32 * 4 + eight % 2 * 2 + at.warpgroup;
}

#if !BACKWARD

// gates (T, B, 4 H): products of the input with both biases, and with `save` the gates afterwards. hidden, cell
// (T + 1, B, H): the states after each frame, behind those before the first one, which are zeros and stay untouched;
// cell only with `save`. fresh: (BUFFERS, groups, TILES, 4, ROWS_WORDS) words, all MISSING. arrived: 32 zeros a group.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    lstm_recurrence_forward(u16* gates, u16* hidden, u16* cell, const u16* weights, const int* lengths, u32* fresh,
                            u32* arrived, int frames, int batch, int first_row, int end_row, int save) {
  constexpr int OWN_UNITS = UNITS / 4;  // of a thread
  int groups = gridDim.x / GROUP_BLOCKS, group = blockIdx.x / GROUP_BLOCKS, block = blockIdx.x % GROUP_BLOCKS;
  Place at = place_of(block);
  u32* counter = arrived + group * 32;
  int ends[TILES], warp_ends[TILES], group_end = 0, half = at.warpgroup;
  Rows rows[TILES];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    rows[tile] = rows_of(at, tile, first_row + group * ROWS, end_row, lengths, frames);
  }
  longest_of(ends, warp_ends, rows, at);
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) group_end = max(group_end, ends[tile]);
  load_weights(at, weights, block / CLUSTER * CLUSTER * UNITS);

  u64 stride = (u64)batch * HIDDEN;  // of a frame of a state
  u64 own_unit[TILES];  // the first of a thread's units
  int length[TILES];
  bool there[TILES];
  float state[TILES][OWN_UNITS];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    own_unit[tile] = (u64)(half ? rows[tile].index[1] : rows[tile].index[0]) * HIDDEN + at.first_unit + at.quad;
    length[tile] = half ? rows[tile].length[1] : rows[tile].length[0];
    there[tile] = half ? rows[tile].there[1] : rows[tile].there[0];
    u32* target = fresh_rows(fresh, at, 0, group, groups, tile);
#pragma unroll
    for (int i = 0; i < OWN_UNITS; ++i) {
      state[tile][i] = 0.0f;
      if (i % 2 == 0 && warp_ends[tile] > 0 && at.first_unit + 4 * i < HIDDEN) {
        store_fresh(target + word_of_units(at, i / 2), 0);
      }
    }
  }
  __syncthreads();
  arrive(counter);

  for (int time = 0; time < frames; ++time) {
    uint2 own_gates[TILES][OWN_UNITS];
    u32 results[TILES][OWN_UNITS / 2];
    if (time < group_end) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < OWN_UNITS; ++i) {
          own_gates[tile][i] = make_uint2(0, 0);
          if (time < length[tile] && at.first_unit + 4 * i < HIDDEN) {
            own_gates[tile][i] = load_once((const uint2*)gates + (time * stride + own_unit[tile] + 4 * i));
          }
        }
      }
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        if (time >= ends[tile]) continue;
        float sums[COLUMNS / 2], own[SUMS][2];
        multiply_all(sums, at, time < warp_ends[tile], fresh_rows(fresh, at, time, group, groups, tile),
                     counter, time + 1);
        reduce(own, sums, at);
        if (time >= warp_ends[tile]) continue;
        u32* target = fresh_rows(fresh, at, time + 1, group, groups, tile);
        u32* previous = fresh_rows(fresh, at, time - 1, group, groups, tile);
        float result[OWN_UNITS];
#pragma unroll
        for (int i = 0; i < OWN_UNITS; ++i) {
          float in, forget, proposed, out;
          unpack(own_gates[tile][i].x, in, forget);
          unpack(own_gates[tile][i].y, proposed, out);
          in = sigmoid(in + own[2 * i][0]);
          forget = sigmoid(forget + own[2 * i][1]);
          proposed = hyperbolic(proposed + own[2 * i + 1][0]);
          out = sigmoid(out + own[2 * i + 1][1]);
          state[tile][i] = forget * state[tile][i] + in * proposed;
          result[i] = out * hyperbolic(state[tile][i]);
          own_gates[tile][i] = make_uint2(pack(in, forget), pack(proposed, out));
        }
#pragma unroll
        for (int pair = 0; pair < OWN_UNITS / 2; ++pair) {
          results[tile][pair] = pack(result[2 * pair], result[2 * pair + 1]);
          if (at.first_unit + 8 * pair < HIDDEN) store_fresh(target + word_of_units(at, pair), results[tile][pair]);
        }
#pragma unroll
        for (int pair = 0; pair < OWN_UNITS / 2 && WAIT == LOAD; ++pair) {
          if (at.first_unit + 8 * pair < HIDDEN) store_fresh(previous + word_of_units(at, pair), MISSING);
        }
      }
      if (time + 1 < group_end) arrive(counter);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {  // what no block waits for
      if (!there[tile]) continue;
      u64 next = (time + 1) * stride + own_unit[tile];
#pragma unroll
      for (int i = 0; i < OWN_UNITS; ++i) {
        if (at.first_unit + 4 * i >= HIDDEN) continue;
        if (time >= length[tile]) {
          hidden[next + 4 * i] = 0;
          continue;
        }
        hidden[next + 4 * i] = (u16)(i % 2 ? results[tile][i / 2] >> 16 : results[tile][i / 2]);
        if (save) {
          ((uint2*)gates)[time * stride + own_unit[tile] + 4 * i] = own_gates[tile][i];
          cell[next + 4 * i] = (u16)pack(state[tile][i], 0.0f);
        }
      }
    }
  }
}

#else

// gates (T, B, 4 H): the gates of forward, and afterwards the gradients of what went into them, 0 behind a row's end.
// cell (T + 1, B, H): as forward. d_hidden (T, B, H): gradient of the result. d_bias (4 groups, 4 H): sums of the
// gates' gradients over frames and some rows. fresh, arrived: as forward.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    lstm_recurrence_backward(u16* gates, const u16* cell, const u16* d_hidden, float* d_bias, const u16* weights,
                             const int* lengths, u32* fresh, u32* arrived, int frames, int batch, int first_row,
                             int end_row) {
  int groups = gridDim.x / GROUP_BLOCKS, group = blockIdx.x / GROUP_BLOCKS, block = blockIdx.x % GROUP_BLOCKS;
  Place at = place_of(block);
  u32* counter = arrived + group * 32;
  int ends[TILES], warp_ends[TILES], group_end = 0;
  Rows rows[TILES];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    rows[tile] = rows_of(at, tile, first_row + group * ROWS, end_row, lengths, frames);
  }
  longest_of(ends, warp_ends, rows, at);
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) group_end = max(group_end, ends[tile]);
  load_weights(at, weights, block / CLUSTER * CLUSTER * UNITS);
  __syncthreads();

  u64 stride = (u64)batch * HIDDEN;
  int own_unit = at.first_unit + 2 * at.quad + at.warpgroup;  // the first of a thread's units
  float d_state[TILES][SUMS][2], sum_gates[SUMS][4];
  u16 after[TILES][SUMS][2];  // the cell state after the frame
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      d_state[tile][i][0] = d_state[tile][i][1] = 0.0f;
      after[tile][i][0] = after[tile][i][1] = 0;
    }
#pragma unroll
    for (int gate = 0; gate < 4; ++gate) sum_gates[i][gate] = 0.0f;
  }

  for (int time = frames - 1; time >= 0; --time) {
    uint2 own_gates[TILES][SUMS][2];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) own_gates[tile][i][0] = own_gates[tile][i][1] = make_uint2(0, 0);
    }
    if (time < group_end) {
      u16 before[TILES][SUMS][2], d_result[TILES][SUMS][2];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u64 unit = time * stride + (u64)rows[tile].index[half] * HIDDEN + own_unit;
#pragma unroll
          for (int i = 0; i < SUMS; ++i) {
            before[tile][i][half] = d_result[tile][i][half] = 0;
            if (time < rows[tile].length[half] && at.first_unit + 8 * i < HIDDEN) {
              own_gates[tile][i][half] = load_once((const uint2*)gates + unit + 8 * i);
              before[tile][i][half] = load_once(cell + unit + 8 * i);
              d_result[tile][i][half] = load_once(d_hidden + unit + 8 * i);
              if (time == rows[tile].length[half] - 1) after[tile][i][half] = load_once(cell + stride + unit + 8 * i);
            }
          }
        }
      }
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        if (time >= ends[tile]) continue;
        float own[SUMS][2];
        if (time + 1 < ends[tile]) {
          float sums[COLUMNS / 2];
          multiply_all(sums, at, time + 1 < warp_ends[tile], fresh_rows(fresh, at, time + 1, group, groups, tile),
                       counter, group_end - 1 - time);
          reduce(own, sums, at);
        }
        if (time >= warp_ends[tile]) continue;
        u32* target = fresh_rows(fresh, at, time, group, groups, tile) + at.thread % 32 * 4;
        u32* previous = fresh_rows(fresh, at, time + 2, group, groups, tile) + at.thread % 32 * 4;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
          if (at.first_unit + 8 * i >= HIDDEN) continue;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (time >= rows[tile].length[half]) continue;
            float d_h, c_before, c_after, in, forget, proposed, out, unused;
            unpack(d_result[tile][i][half], d_h, unused);
            unpack(before[tile][i][half], c_before, unused);
            unpack(after[tile][i][half], c_after, unused);
            unpack(own_gates[tile][i][half].x, in, forget);
            unpack(own_gates[tile][i][half].y, proposed, out);
            if (time < rows[tile].length[half] - 1) d_h += own[i][half];
            float squashed = hyperbolic(c_after);
            float d_c = d_state[tile][i][half] + d_h * out * (1.0f - squashed * squashed);
            float d_in = d_c * proposed * in * (1.0f - in);
            float d_forget = d_c * c_before * forget * (1.0f - forget);
            float d_proposed = d_c * in * (1.0f - proposed * proposed);
            float d_out = d_h * squashed * out * (1.0f - out);
            d_state[tile][i][half] = d_c * forget;
            after[tile][i][half] = before[tile][i][half];
            own_gates[tile][i][half] = make_uint2(pack(d_in, d_forget), pack(d_proposed, d_out));
            sum_gates[i][0] += d_in;
            sum_gates[i][1] += d_forget;
            sum_gates[i][2] += d_proposed;
            sum_gates[i][3] += d_out;
          }
          store_fresh(target + ((at.first_unit / 8 + i) * 2 + at.warpgroup) * 128, own_gates[tile][i][0].x,
                      own_gates[tile][i][1].x, own_gates[tile][i][0].y, own_gates[tile][i][1].y);
        }
#pragma unroll
        for (int i = 0; i < SUMS && WAIT == LOAD; ++i) {
          if (at.first_unit + 8 * i < HIDDEN) {
            store_fresh(previous + ((at.first_unit / 8 + i) * 2 + at.warpgroup) * 128, MISSING, MISSING, MISSING,
                        MISSING);
          }
        }
      }
      if (time > 0) arrive(counter);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {  // what no block waits for
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!rows[tile].there[half]) continue;
        u64 unit = time * stride + (u64)rows[tile].index[half] * HIDDEN + own_unit;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
          if (at.first_unit + 8 * i < HIDDEN) ((uint2*)gates)[unit + 8 * i] = own_gates[tile][i][half];
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    if (at.first_unit + 8 * i >= HIDDEN) continue;
#pragma unroll
    for (int gate = 0; gate < 4; ++gate) {
      float sum = sum_gates[i][gate];
      sum += __shfl_xor_sync(0xffffffffu, sum, 4);
      sum += __shfl_xor_sync(0xffffffffu, sum, 8);
      sum += __shfl_xor_sync(0xffffffffu, sum, 16);
      if (at.row == 0) d_bias[(u64)(group * 4 + at.warp) * (4 * HIDDEN) + 4 * (own_unit + 8 * i) + gate] = sum;
    }
  }
}

#endif
