// Loads and arithmetic of the query's RMSNorm and RoPE for a warp that has whole heads: bit for bit that of SGLang's
// fused_q_norm_rope (0.5.12 to 0.5.23), read off its source and machine code.
//
// Lane l has values 8 l .. 8 l + 7 and 256 + 8 l .. 256 + 8 l + 7. It adds their squares one after the other; the
// lanes' sums meet by xor 16, 8, 4, 2, 1. All 512 values are rounded to bf16 behind the norm, the last 64 (lanes 24 to
// 31, second vector) rotated from those in fp32 and rounded again.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/cache_layout.h"
#include "common/ptx.cuh"
#include "decode/query.h"
#include "store/row.cuh"

namespace sgl_dsv4::query {

inline constexpr int kVec = 8;  // values of a vector of 16 bytes
inline constexpr int kVectors = kHeadDim / (32 * kVec);
inline constexpr int kPairs = kVec / 2;
inline constexpr int kRopeVectors = kRopeDim / kVec;
inline constexpr int kFirstRopeLane = 32 - kRopeVectors;
static_assert(kVectors == 2 && kFirstRopeLane == 24);

// A lane's part of a head.
struct Values {
  Words<kPairs> vector[kVectors];  // two bf16 a word
};

// (cos, sin) of the pairs of a vector of the rope part.
struct Factors {
  float2 pair[kPairs];
};

// ---- loads ----

// Eight bf16.
template <bool kAligned>
__device__ __forceinline__ Words<kPairs> load_vector(const __nv_bfloat16* from) {
  if constexpr (kAligned) return *reinterpret_cast<const Words<kPairs>*>(from);
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
  Words<kPairs> v;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) v.word[i] = bits[2 * i] | static_cast<uint32_t>(bits[2 * i + 1]) << 16;
  return v;
}

// A position as it lies in memory: nothing waits for its load before it is used.
struct Position {
  uint32_t low, high;  // high: of an int64

  __device__ __forceinline__ int64_t value(const QueryPrologue& p) const {
    const int64_t narrow = static_cast<int32_t>(low);
    return p.positions_are_int64 ? static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low) : narrow;
  }
};

// Where a row's position lies.
__device__ __forceinline__ const uint32_t* find_position(const QueryPrologue& p, int64_t token) {
  const uint32_t* at =
      static_cast<const uint32_t*>(p.positions) + token * p.stride_positions_token * (p.positions_are_int64 ? 2 : 1);
  ptx::keep(at);
  return at;
}
__device__ __forceinline__ Position load_position(const QueryPrologue& p, const uint32_t* at, bool wanted) {
  return {ptx::ld_global_if(wanted, at, 0), ptx::ld_global_if(wanted && p.positions_are_int64, at + 1, 0)};
}
__device__ __forceinline__ Position load_position(const QueryPrologue& p, int64_t token, bool wanted) {
  return load_position(p, find_position(p, token), wanted);
}

// Of the rope part's vector `vector`; NaN outside the table. kAligned: rows of the table start at multiples of 16
// bytes, else of 8.
template <bool kAligned>
__device__ __forceinline__ Factors load_factors(const QueryPrologue& p, Position at, int vector) {
  const int64_t position = at.value(p);
  Factors factors;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) factors.pair[i] = make_float2(NAN, NAN);
  if (position < 0 || position >= p.num_freqs) return factors;
  const float* row = p.freqs_cis + position * p.stride_freqs_position + vector * kVec;
#pragma unroll
  for (int i = 0; i < kPairs; i += 2) {
    if constexpr (kAligned) {
      const float4 two = *reinterpret_cast<const float4*>(row + 2 * i);
      factors.pair[i] = make_float2(two.x, two.y);
      factors.pair[i + 1] = make_float2(two.z, two.w);
    } else {
      factors.pair[i] = *reinterpret_cast<const float2*>(row + 2 * i);
      factors.pair[i + 1] = *reinterpret_cast<const float2*>(row + 2 * i + 2);
    }
  }
  return factors;
}

// ---- arithmetic ----

// A lane's share.
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
  return sum;
}

__device__ __forceinline__ void scale(Values& values, float factor) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 x = unpack_bf16(values.vector[v].word[i]);
      values.vector[v].word[i] = pack_bf16(make_float2(__fmul_rn(x.x, factor), __fmul_rn(x.y, factor)));
    }
  }
}

// Executed by all lanes of the warp. Shuffles of the heads alternate: their order in the code is the one they are
// issued in.
template <int kHeads>
__device__ __forceinline__ void normalise(Values (&heads)[kHeads], float eps) {
  float sum[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) sum[h] = sum_of_squares(heads[h]);
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], bit);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) scale(heads[h], norm_factor(sum[h], eps));
}

// Of a vector of the rope part.
__device__ __forceinline__ void rotate(Words<kPairs>& vector, const Factors& factors) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    vector.word[i] = pack_bf16(sgl_dsv4::rotate(unpack_bf16(vector.word[i]), factors.pair[i]));
}

}  // namespace sgl_dsv4::query
