// Arithmetic of the query's RMSNorm and RoPE for a warp that has one head: bit for bit that of SGLang's
// fused_q_norm_rope (0.5.12 to 0.5.23), read off its source and machine code.
//
// Lane l has values 8 l .. 8 l + 7 and 256 + 8 l .. 256 + 8 l + 7. It adds their squares one after the other; the
// lanes' sums meet by xor 16, 8, 4, 2, 1. All 512 values are rounded to bf16 behind the norm, the last 64 (lanes 24 to
// 31, second vector) rotated from those in fp32 and rounded again.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/cache_layout.h"
#include "store/row.cuh"

namespace sgl_dsv4::query {

inline constexpr int kVec = 8;  // values of a vector of 16 bytes
inline constexpr int kVectors = kHeadDim / (32 * kVec);
inline constexpr int kPairs = kVec / 2;
inline constexpr int kFirstRopeLane = 32 - kRopeDim / kVec;
static_assert(kVectors == 2 && kFirstRopeLane == 24);

// A lane's part of a head.
struct Values {
  Words<kPairs> vector[kVectors];  // two bf16 a word
};

// (cos, sin) of a rope lane's pairs.
struct Factors {
  float2 pair[kPairs];
};

__device__ __forceinline__ float sum_of_squares(const Values& values) {
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 x = unpack_bf16(values.vector[v].word[i]);
      sum = __fmaf_rn(x.x, x.x, sum);
      sum = __fmaf_rn(x.y, x.y, sum);
    }
  }
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
  return sum;
}

// Executed by all lanes of the warp.
__device__ __forceinline__ void normalise(Values& values, float eps) {
  const float norm = norm_factor(sum_of_squares(values), eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 x = unpack_bf16(values.vector[v].word[i]);
      values.vector[v].word[i] = pack_bf16(make_float2(__fmul_rn(x.x, norm), __fmul_rn(x.y, norm)));
    }
  }
}

// Of a rope lane.
__device__ __forceinline__ void rotate(Values& values, const Factors& factors) {
  Words<kPairs>& last = values.vector[kVectors - 1];
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    last.word[i] = pack_bf16(sgl_dsv4::rotate(unpack_bf16(last.word[i]), factors.pair[i]));
}

}  // namespace sgl_dsv4::query
