// One token a block of 256 threads, one pair of values a thread: the mapping for few tokens, where the time is one
// row's latency. A warp is a scale group, the last warp the rope part.
//
// The row is fetched before it is known whether it will be stored, so that the fetch overlaps the plan's; the RoPE
// factors, two dependent fetches away, are needed by the last warp alone. The kernel also takes what the 16-byte
// accesses of warp_per_token.cuh cannot: rows, tables and caches of any alignment (kAligned = false).
//
// Little is left to gain: on an H200 a kernel of this grid that only loads the row and stores as many bytes takes 0.91
// to 0.93 of SGLang's time for 1 to 64 rows of the main store, this one 0.93 to 1.03. Tried, all within the noise: the
// sums of the warps added from two 16-byte loads instead of shuffles, the RoPE part in the first warp, the weight after
// the row, a late launch_dependents or none, one warp's indices shared; 2 tokens a block. Slower: 128 threads a token
// (0.03 us), 64 (0.3), 2 tokens a thread (0.3), a ninth warp that runs ahead to warm the instruction cache (0.2).
#pragma once

#include "common/ptx.cuh"
#include "store/row.cuh"

namespace sgl_dsv4 {

inline constexpr int kBlockThreads = kHeadDim / 2;
inline constexpr int kBlockWarps = kBlockThreads / 32;
static_assert(kBlockWarps == kNumScales + 1);

// Sum of squares of the row in SGLang's order; every thread gets it. (Every warp making the whole sum from loads of its
// own, without barrier and shared memory, was 0.3 us slower.)
__device__ __forceinline__ float block_sum_of_squares(float2 x, unsigned warp, unsigned lane) {
  __shared__ float warp_sums[kBlockWarps];
  float sum = pair_square(x);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, mask));
  if (lane == 0) warp_sums[warp] = sum;
  __syncthreads();
  sum = warp_sums[lane % kBlockWarps];
#pragma unroll
  for (int mask = kBlockWarps / 2; mask > 0; mask /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, mask));
  return sum;
}

template <typename T, StoreEntry kEntry, CacheLayout kLayout, typename Index, bool kAligned>
__global__ void __launch_bounds__(kBlockThreads) store_block_per_token(const __grid_constant__ StoreParams p) {
  constexpr int kWords = sizeof(T) / 2;  // of a pair
  const unsigned thread = threadIdx.x;
  const unsigned warp = thread / 32;
  const unsigned lane = thread % 32;
  const uint32_t token = blockIdx.x;
  const bool is_rope = warp == kNumScales;

  const Words<kWords> weight = load_words<kWords, Reuse::kKept, kAligned>(static_cast<const T*>(p.weight) + 2 * thread);

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();

  const Row row = resolve_row<kEntry, Index>(p, token);
  const Words<kWords> input = load_words<kWords, Reuse::kStreamed, kAligned>(row_of<T>(p, token) + 2 * thread);
  float2 freq = {};
  if (is_rope && row.has_frequencies(p))
    freq = pair_of<float>(load_words<2, Reuse::kKept, kAligned>(freqs_of(p, row) + 2 * lane), 0);
  if constexpr (kEntry == StoreEntry::kCompressDecode) {
    __syncwarp();                   // keeps the loads before the exit
    if (!row.is_stored(p)) return;  // most rows: one decode step in `ratio` completes a compressed one
  }

  float2 x = pair_of<T>(input, 0);
  const float norm = norm_factor(block_sum_of_squares(x, warp, lane), p.eps);
  x = normalize(x, norm, pair_of<T>(weight, 0));

  if (!row.is_stored(p)) return;
  if constexpr (kLayout == CacheLayout::kBf16) {
    const Destination to = destination<Bf16Layout>(p, row.slot);
    if (is_rope) x = rotate(x, freq);
    store_packed<kAligned>(to.page + (to.data_offset + 4 * thread), pack_bf16(x));
  } else {
    const Destination to = destination<V4Layout>(p, row.slot);
    if (is_rope) {
      store_packed<kAligned>(to.page + (to.data_offset + V4Layout::kRopeOffset + 4 * lane), pack_bf16(rotate(x, freq)));
      return;
    }
    if (kEntry != StoreEntry::kMain) x = unpack_bf16(pack_bf16(x));
    // Non-negative floats are ordered as their bits, and the floor has removed NaN.
    const uint32_t bits = __float_as_uint(fmaxf(kAmaxFloor, abs_max(x.x, x.y)));
    const int exponent = ue8m0_scale(__uint_as_float(__reduce_max_sync(kFullWarp, bits)));
    const uint32_t codes = pack_e4m3_without_nan(x, inverse_ue8m0(exponent));
    store_packed<kAligned>(to.page + (to.data_offset + 2 * thread), static_cast<uint16_t>(codes));
    if (lane == 0) to.page[to.scale_offset + warp] = static_cast<uint8_t>(exponent);
  }
}

}  // namespace sgl_dsv4
