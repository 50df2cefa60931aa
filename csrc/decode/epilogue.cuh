// The epilogue of one head, as small functions on the fp32 values that one thread holds: decode.h has the order and the
// rules. They assume nothing about which thread holds which channels, except that a thread holds whole RoPE pairs. A
// group of 2^n lanes that share a scale meets in lanes_max. The arithmetic is host code too, so that it can be tested
// exhaustively without a GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace sgl_dsv4::epilogue {

inline constexpr float kE4m3Max = 448.0f;
inline constexpr float kAmaxFloor = 1e-10f;
inline constexpr float kFloatMax = 3.402823466e38f;
inline constexpr uint32_t kInfinityBits = 0x7f800000u;

__host__ __device__ __forceinline__ uint32_t float_bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

__host__ __device__ __forceinline__ float bits_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

// ---- 1. sink ----

// 1 / (1 + exp(sink - lse)) for every float32 sink: the exponential is taken of a number <= 0, so nothing overflows on
// the way to 0 or to 1, and a NaN stays one. `lse` is the natural-log LSE of a row that attends to something.
__host__ __device__ __forceinline__ float sink_factor(float sink, float lse) {
  const float difference = sink - lse;
  const float e = expf(-fabsf(difference));
  return (difference > 0.0f ? e : 1.0f) / (1.0f + e);
}

// ---- 2. inverse RoPE ----

// (real, imaginary) *= cos - i sin. Explicit fma: the compiler's choice of contraction must not depend on the kernel.
__host__ __device__ __forceinline__ void rotate_back(float& real, float& imaginary, float cosine, float sine) {
  const float r = fmaf(real, cosine, imaginary * sine);
  imaginary = fmaf(imaginary, cosine, -(real * sine));
  real = r;
}

// ---- 3. amax ----

// |x| as bits: unsigned order is the order of the values, with NaN above infinity.
__host__ __device__ __forceinline__ uint32_t abs_bits(float x) {
  return float_bits(x) & 0x7fffffffu;
}

template <int kValues>
__host__ __device__ __forceinline__ uint32_t abs_max_bits(const float (&x)[kValues]) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) most = abs_bits(x[i]) > most ? abs_bits(x[i]) : most;
  return most;
}

// The same without NaN, and with infinity as the largest finite value: what a scale is made of. It is always finite.
template <int kValues>
__host__ __device__ __forceinline__ uint32_t finite_abs_max_bits(const float (&x)[kValues]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kValues; ++i) most = fmaxf(most, fabsf(x[i]));  // fmaxf drops the NaN
  return float_bits(fminf(most, kFloatMax));
}

#ifdef __CUDACC__
// Maximum over aligned groups of kLanes neighbouring lanes; every lane of the warp takes part and gets its group's.
template <int kLanes>
__device__ __forceinline__ uint32_t lanes_max(uint32_t x) {
  static_assert(kLanes >= 1 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0);
  if constexpr (kLanes == 32) {
    x = __reduce_max_sync(0xffffffffu, x);
  } else {
#pragma unroll
    for (int lane_bit = 1; lane_bit < kLanes; lane_bit *= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, lane_bit));
  }
  return x;
}
#endif

// ---- 4. scales and rounding ----

// A group's scale, and how a value is divided by it.
struct Fp32Scale {
  float scale;
  __host__ __device__ explicit Fp32Scale(uint32_t amax_bits)
      : scale(fmaxf(bits_float(amax_bits), kAmaxFloor) / kE4m3Max) {}
  // An IEEE division: one rounding before the one to e4m3, where multiplying by a reciprocal has two. (Over 2e7 random
  // values the codes are equally near; the division is what x / scale means elsewhere.)
  __host__ __device__ float divide(float x) const { return x / scale; }
};

struct Ue8m0Scale {
  uint32_t exponent;  // the stored byte; scale = 2^(exponent - 127). In [85, 247]: amax is floored and finite
  __host__ __device__ explicit Ue8m0Scale(uint32_t amax_bits) {
    const uint32_t bits = float_bits(fmaxf(bits_float(amax_bits), kAmaxFloor) / kE4m3Max);
    exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);  // rounded up to a power of two
  }
  // By a power of two, so exact (but for results far below the smallest e4m3, which round to 0 either way).
  __host__ __device__ float divide(float x) const { return x * bits_float((254u - exponent) << 23); }
};

// fp32 -> e4m3, nearest even, saturating; NaN -> 0x7f. One rounding, straight from fp32: going through half would round
// twice and miss midpoints.
__host__ __device__ __forceinline__ uint32_t e4m3_software(float x) {
  const uint32_t sign = float_bits(x) >> 24 & 0x80u;
  const uint32_t a = abs_bits(x);
  constexpr uint32_t kMaxBits = 0x43e00000u;        // 448
  constexpr uint32_t kMinNormalBits = 0x3c800000u;  // 2^-6
  if (a > kInfinityBits) return 0x7fu;
  if (a >= kMaxBits) return sign | 0x7eu;
  if (a >= kMinNormalBits) {
    // Keep 3 of 23 mantissa bits; a carry runs into the exponent, as it should. Below 448 it never reaches 0x7f.
    const uint32_t rounded = a + 0x7ffffu + (a >> 20 & 1u);
    return sign | ((rounded >> 20) - ((127u - 7u) << 3));
  }
  // Subnormal codes are multiples of 2^-9, which is the spacing of floats from 2^14 on: the addition rounds.
  const float two14 = 16384.0f;
  return sign | (float_bits(bits_float(a) + two14) - float_bits(two14));
}

#ifdef __CUDACC__
// PTX ISA, "cvt.rn.satfinite.e4m3x2.f32" (sm_89+): `low` in the low byte.
__device__ __forceinline__ uint32_t cvt_e4m3x2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
#else
  return e4m3_software(low) | e4m3_software(high) << 8;
#endif
}

// Four values over their scale, the first in the lowest byte.
template <typename Scale>
__device__ __forceinline__ uint32_t quantise4(const float (&x)[4], const Scale& scale) {
  return cvt_e4m3x2(scale.divide(x[0]), scale.divide(x[1])) | cvt_e4m3x2(scale.divide(x[2]), scale.divide(x[3])) << 16;
}

// Two values rounded to bf16, `low` in the low half.
__device__ __forceinline__ uint32_t cvt_bf16x2(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return static_cast<uint32_t>(__bfloat16_as_ushort(pair.y)) << 16 | __bfloat16_as_ushort(pair.x);
}
#endif

}  // namespace sgl_dsv4::epilogue
