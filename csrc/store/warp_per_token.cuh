// Four tokens a block, one warp each: the mapping for many tokens.
//
// A warp needs about a fifth of the instructions that a 256-thread block spends on a token, no shared memory and no
// barrier, and 40 independent rows are in flight on an SM. With few tokens its long instruction stream is what one
// waits for; block_per_token.cuh is faster there.
#pragma once

#include "common/ptx.cuh"
#include "store/lane_map.cuh"
#include "store/row.cuh"

namespace sgl_dsv4 {

inline constexpr int kWarpTokensPerBlock = 4;
inline constexpr int kWarpBlocksPerSm = 10;  // caps registers at 48; 12 spills, fewer leave loads out of flight

// `x` = the lane's 8 pairs after the norm, in element order; `freq` = the RoPE factors of its last vector's pairs.
template <StoreEntry kEntry, int kPerVector, int kPairs>
__device__ __forceinline__ void store_v4(const Destination& to, const float2 (&x)[8], const float2 (&freq)[kPairs],
                                         int lane) {
  using Map = LaneMap<kPerVector>;
  constexpr int kLast = Map::kVectors - 1;
  uint8_t* row = to.page + (to.data_offset + lane * kPerVector);
  const bool is_rope = Map::group(kLast, lane) == kNumScales;

  // Rope part: the lanes whose last vector is the eighth group.
  if (is_rope) {
    Words<kPairs> out;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) out.word[i] = pack_bf16(rotate(x[kLast * kPairs + i], freq[i]));
    constexpr int kFirst = V4Layout::kRopeOffset + (kLast * 32 * kPerVector - kNopeDim) * 2;  // of lane 0, were it rope
    store_packed<true>(row + kFirst + lane * kPerVector, out);
  }

  // Amax and scale of each group.
  float2 q[8];
  float amax;
  if constexpr (kEntry == StoreEntry::kMain) {
    float m[Map::kVectors];
#pragma unroll
    for (int v = 0; v < Map::kVectors; ++v) {
      m[v] = kAmaxFloor;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        q[v * kPairs + i] = x[v * kPairs + i];
        m[v] = fmaxf(m[v], abs_max(q[v * kPairs + i].x, q[v * kPairs + i].y));
      }
    }
    amax = Map::group_amax(m, lane);
  } else {
    // Rounded to bf16, where a packed maximum takes two values at once.
    __nv_bfloat162 m[Map::kVectors];
#pragma unroll
    for (int v = 0; v < Map::kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const uint32_t bits = pack_bf16(x[v * kPairs + i]);
        q[v * kPairs + i] = unpack_bf16(bits);
        const __nv_bfloat162 magnitude = __habs2(*reinterpret_cast<const __nv_bfloat162*>(&bits));
        m[v] = i == 0 ? magnitude : __hmax2(m[v], magnitude);
      }
    }
    amax = fmaxf(kAmaxFloor, Map::group_amax(m, lane));
  }
  const int exponent = ue8m0_scale(amax);
  const float inverse_scale = inverse_ue8m0(exponent);

  // Codes.
  constexpr int kCodeWords = kPerVector / 4;
  Words<kCodeWords> codes[Map::kVectors];
  uint32_t nan = 0;
#pragma unroll
  for (int v = 0; v < Map::kVectors; ++v) {
    const float inverse = __shfl_sync(kFullWarp, inverse_scale, Map::amax_lane(v, lane));
#pragma unroll
    for (int w = 0; w < kCodeWords; ++w) {
      const int first = v * kPairs + 2 * w;
      codes[v].word[w] = pack_e4m3(q[first], inverse) | pack_e4m3(q[first + 1], inverse) << 16;
      nan |= nan_codes(codes[v].word[w]);
    }
  }
  if (nan != 0) {  // rare: the input holds NaN or infinity
#pragma unroll
    for (int v = 0; v < Map::kVectors; ++v)
#pragma unroll
      for (int w = 0; w < kCodeWords; ++w) codes[v].word[w] = replace_nan_codes(codes[v].word[w]);
  }
#pragma unroll
  for (int v = 0; v < Map::kVectors; ++v)
    if (v < kLast || !is_rope) store_packed<true>(row + v * 32 * kPerVector, codes[v]);

  const int group = Map::amax_group(lane);
  if (lane % Map::kAmaxReplicas == 0 && group < kNumScales)
    to.page[to.scale_offset + group] = static_cast<uint8_t>(exponent);
}

template <int kPerVector, int kPairs>
__device__ __forceinline__ void store_bf16(const Destination& to, const float2 (&x)[8], const float2 (&freq)[kPairs],
                                           int lane) {
  using Map = LaneMap<kPerVector>;
  uint8_t* row = to.page + (to.data_offset + lane * kPerVector * 2);
#pragma unroll
  for (int v = 0; v < Map::kVectors; ++v) {
    const bool is_rope = Map::group(v, lane) == kNumScales;
    Words<kPairs> out;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 r = x[v * kPairs + i];
      out.word[i] = pack_bf16(is_rope ? rotate(r, freq[i]) : r);
    }
    store_packed<true>(row + v * 32 * kPerVector * 2, out);
  }
}

template <typename T, StoreEntry kEntry, CacheLayout kLayout, typename Index>
__global__ void __launch_bounds__(32 * kWarpTokensPerBlock, kWarpBlocksPerSm)
    store_warp_per_token(const __grid_constant__ StoreParams p) {
  constexpr int kPerVector = 16 / sizeof(T);
  constexpr int kPairs = kPerVector / 2;
  using Map = LaneMap<kPerVector>;
  const int lane = threadIdx.x % 32;
  const uint32_t token = blockIdx.x * kWarpTokensPerBlock + threadIdx.x / 32;

  // Weight: constant, so it may be read before the wait on the previous grid.
  Words<4> weight[Map::kVectors];
#pragma unroll
  for (int v = 0; v < Map::kVectors; ++v)
    weight[v] = load_words<4, Reuse::kKept, true>(static_cast<const T*>(p.weight) + (v * 32 + lane) * kPerVector);

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();

  // Resolve: a row that writes nothing reads nothing more.
  if (token >= p.num_tokens) return;
  const Row row = resolve_row<kEntry, Index>(p, token);
  if (!row.is_stored(p)) return;

  // Load: the row, read once, and its RoPE factors.
  const T* kv = row_of<T>(p, token);
  Words<4> input[Map::kVectors];
#pragma unroll
  for (int v = 0; v < Map::kVectors; ++v)
    input[v] = load_words<4, Reuse::kStreamed, true>(kv + (v * 32 + lane) * kPerVector);
  float2 freq[kPairs];
  if (Map::group(Map::kVectors - 1, lane) == kNumScales) {
    constexpr int kFirst = (Map::kVectors - 1) * 32 * kPerVector - kNopeDim;  // of lane 0, were it rope
    const float* f = freqs_of(p, row) + kFirst + lane * kPerVector;
#pragma unroll
    for (int i = 0; i < kPairs; i += 2) {
      const Words<4> four = load_words<4, Reuse::kKept, true>(f + 2 * i);
      freq[i] = pair_of<float>(four, 0);
      freq[i + 1] = pair_of<float>(four, 1);
    }
  }

  // Norm.
  float2 x[8];
  float squares[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = pair_of<T>(input[i / kPairs], i % kPairs);
    squares[i] = pair_square(x[i]);
  }
  const float norm = norm_factor(sum_of_pairs<kPerVector>(squares, lane), p.eps);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = normalize(x[i], norm, pair_of<T>(weight[i / kPairs], i % kPairs));

  // Store.
  if constexpr (kLayout == CacheLayout::kV4) {
    store_v4<kEntry, kPerVector>(destination<V4Layout>(p, row.slot), x, freq, lane);
  } else {
    store_bf16<kPerVector>(destination<Bf16Layout>(p, row.slot), x, freq, lane);
  }
}

}  // namespace sgl_dsv4
