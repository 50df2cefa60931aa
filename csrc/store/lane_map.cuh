// How one warp holds one row of 512 values, and its two reductions.
//
// A lane holds 16-byte vectors: vector v of lane l covers elements v * 32 * E + l * E .. + E, with E = 8 values (bf16
// input, 2 vectors) or 4 (fp32, 4 vectors). Loads and stores are then full width, and a scale group of 64 values lies
// in 64 / E neighbouring lanes of one vector.
//
// Byte identity with SGLang's kernel asks for one exact order of additions (it gives a pair to a thread and a scale
// group of 32 pairs to a warp): pairs p = 0..31 of a group by p ^ 16, 8, 4, 2, 1, then the groups g = 0..7 by g ^ 4,
// 2, 1. Addition is commutative, so only the tree counts, not which lane holds which operand. Here the low bits of p
// are registers and the high bits are lanes. The first three steps halve the number of registers ("pack": each half of
// the lanes keeps one of two values), so 12 shuffles do what a plain butterfly over 8 values would take 40 for.
#pragma once

#include <cstdint>

#include "common/cache_layout.h"
#include "store/row.cuh"

namespace sgl_dsv4 {

// Lanes exchange over `mask`; a lane whose `mask` bit is clear ends with op(a of both), the other with op(b of both).
template <typename Op>
__device__ __forceinline__ float pack_step(float a, float b, int mask, int lane, Op op) {
  const bool upper = lane & mask;
  const float keep = upper ? b : a;
  const float send = upper ? a : b;
  return op(keep, __shfl_xor_sync(kFullWarp, send, mask));
}
template <typename Op>
__device__ __forceinline__ float butterfly_step(float a, int mask, Op op) {
  return op(a, __shfl_xor_sync(kFullWarp, a, mask));
}

// Two bf16 in a register.
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 v) {
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ __forceinline__ uint32_t low_halves(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __byte_perm(bits_of(a), bits_of(b), 0x5410);
}
__device__ __forceinline__ uint32_t high_halves(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __byte_perm(bits_of(a), bits_of(b), 0x7632);
}
__device__ __forceinline__ uint32_t max_bf16x2(uint32_t a, uint32_t b) {  // ignores NaN, as fmaxf does
  return bits_of(__hmax2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b)));
}
__device__ __forceinline__ uint32_t butterfly_max_bf16x2(uint32_t a, int mask) {
  return max_bf16x2(a, __shfl_xor_sync(kFullWarp, a, mask));
}

struct Add {
  __device__ __forceinline__ float operator()(float a, float b) const { return __fadd_rn(a, b); }
};
struct Max {  // ignores NaN, as fmaxf does
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Lane masks of the eight steps of the sum, in their order.
struct SumMasks {
  int pack[3];
  int butterfly[5];
};

// kPerVector = E above.
template <int kPerVector>
struct LaneMap;

template <>
struct LaneMap<8> {
  static constexpr int kVectors = 2;
  // p = (lane & 7) << 2 | pair;  group = vector << 2 | lane >> 3.
  // Pack: p ^ 16, 8, 4, onto vector, pair bit 1, pair bit 0. Butterfly: p ^ 2, 1, then group ^ 4, 2, 1.
  static constexpr SumMasks kSumMasks = {{4, 2, 1}, {2, 1, 4, 16, 8}};
  __device__ static __forceinline__ int group(int vector, int lane) { return vector << 2 | lane >> 3; }
  // amax over the 8 lanes of a group, of one value a vector: afterwards a lane holds the amax of `amax_group(lane)`.
  __device__ static __forceinline__ float group_amax(const float (&m)[2], int lane) {
    float a = pack_step(m[0], m[1], 4, lane, Max());
    a = butterfly_step(a, 2, Max());
    return butterfly_step(a, 1, Max());
  }
  // The same of bf16 values, two a register: both vectors in one butterfly.
  __device__ static __forceinline__ float group_amax(const __nv_bfloat162 (&m)[2], int lane) {
    uint32_t both = max_bf16x2(low_halves(m[0], m[1]), high_halves(m[0], m[1]));
    both = butterfly_max_bf16x2(both, 4);
    both = butterfly_max_bf16x2(both, 2);
    both = butterfly_max_bf16x2(both, 1);
    return __uint_as_float(lane & 4 ? both & 0xffff0000u : both << 16);
  }
  __device__ static __forceinline__ int amax_group(int lane) { return (lane >> 2 & 1) << 2 | lane >> 3; }
  // One lane that holds the amax of the group of (vector, lane).
  __device__ static __forceinline__ int amax_lane(int vector, int lane) { return (lane & 24) | vector << 2; }
  static constexpr int kAmaxReplicas = 4;  // lanes l .. l + 3 hold the same amax
};

template <>
struct LaneMap<4> {
  static constexpr int kVectors = 4;
  // p = (lane & 15) << 1 | pair;  group = vector << 1 | lane >> 4.
  // Pack: p ^ 16, 8, 4, onto vector bit 1, vector bit 0, pair. Butterfly: p ^ 2, 1, then group ^ 4, 2, 1.
  static constexpr SumMasks kSumMasks = {{8, 4, 2}, {1, 2, 8, 4, 16}};
  __device__ static __forceinline__ int group(int vector, int lane) { return vector << 1 | lane >> 4; }
  __device__ static __forceinline__ float group_amax(const float (&m)[4], int lane) {
    const float low = pack_step(m[0], m[2], 8, lane, Max());
    const float high = pack_step(m[1], m[3], 8, lane, Max());
    float a = pack_step(low, high, 4, lane, Max());
    a = butterfly_step(a, 2, Max());
    return butterfly_step(a, 1, Max());
  }
  __device__ static __forceinline__ float group_amax(const __nv_bfloat162 (&m)[4], int lane) {
    const uint32_t low = max_bf16x2(low_halves(m[0], m[1]), high_halves(m[0], m[1]));
    const uint32_t high = max_bf16x2(low_halves(m[2], m[3]), high_halves(m[2], m[3]));
    const bool upper = lane & 8;
    uint32_t both = max_bf16x2(upper ? high : low, __shfl_xor_sync(kFullWarp, upper ? low : high, 8));
    both = butterfly_max_bf16x2(both, 4);
    both = butterfly_max_bf16x2(both, 2);
    both = butterfly_max_bf16x2(both, 1);
    return __uint_as_float(lane & 4 ? both & 0xffff0000u : both << 16);
  }
  __device__ static __forceinline__ int amax_group(int lane) {
    return (lane >> 3 & 1) << 2 | (lane >> 2 & 1) << 1 | lane >> 4;
  }
  __device__ static __forceinline__ int amax_lane(int vector, int lane) {
    return (lane & 16) | (vector >> 1) << 3 | (vector & 1) << 2;
  }
  static constexpr int kAmaxReplicas = 4;
};

// Sum of the squares of a row, in the order above; every lane gets it. `s` = the lane's 8 pair sums, in element order.
template <int kPerVector>
__device__ __forceinline__ float sum_of_pairs(const float (&s)[8], int lane) {
  constexpr SumMasks masks = LaneMap<kPerVector>::kSumMasks;
  float a[4], b[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pack_step(s[i], s[i + 4], masks.pack[0], lane, Add());
#pragma unroll
  for (int i = 0; i < 2; ++i) b[i] = pack_step(a[i], a[i + 2], masks.pack[1], lane, Add());
  float sum = pack_step(b[0], b[1], masks.pack[2], lane, Add());
#pragma unroll
  for (int i = 0; i < 5; ++i) sum = butterfly_step(sum, masks.butterfly[i], Add());
  return sum;
}

}  // namespace sgl_dsv4
