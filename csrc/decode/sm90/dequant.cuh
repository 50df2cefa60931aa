// e4m3 codes times a UE8M0 scale to bf16, rounded once.
//
// A code is s eeee mmm with bias 7, a bf16 is s eeeeeeee mmmmmmm with bias 127. With the code's sign in the bf16's sign
// and its other seven bits at bits 10 .. 4, exponent eeee and mantissa mmm0000 read as the code's value times 2^(7 -
// 127): subnormal codes too, as subnormals of bf16. The product with 2^(120 + e - 127), e the scale byte, is the
// result; both factors are exact, so it is rounded once, and only if it is a subnormal of bf16. 2^(e - 7) is a bf16 up
// to e = 134. Larger scales take a second factor; the first product is then exact and normal. No model has them: they
// are noticed, and mended outside of the usual path, as is the scale byte 255, NaN.
//
// Codes 0x7f and 0xff are NaN. They too are only noticed: one NaN anywhere in a row makes all scores of that key NaN,
// and with them the whole result, so one is stored where it is cheap.
//
// So at 64 heads a block. Of 8, 16 and 32 the scores take codes another way, and the values place them two keys at a
// time (raw_tiles.cuh): from here come the bits that a placed code has and the factors of scales.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"

namespace sgl_dsv4::sm90 {

inline constexpr uint32_t kLargestSingleScale = 134;
inline constexpr uint32_t kNanPair = 0x7fff7fffu;
inline constexpr uint32_t kPlacedPair = 0x87f087f0u;  // the bits of two placed codes
inline constexpr uint32_t kOneBf16 = 0x3f80u;
inline constexpr uint32_t kScaleOfOne = 127;

// 2^(e - 7) twice, e <= kLargestSingleScale.
__device__ __forceinline__ uint32_t scale_pair(uint32_t e) {
  return e * 0x00800080u + 0x3c003c00u;
}
// 2^(e - 134) twice, e > kLargestSingleScale; NaN for 255.
__device__ __forceinline__ uint32_t second_scale_pair(uint32_t e) {
  return e == 255 ? kNanPair : (e - 7) * 0x00800080u;
}

// Bit 7 of a byte is set if that code is NaN; the other bits are noise.
__device__ __forceinline__ uint32_t nan_codes(uint32_t codes) {
  return (codes & 0x7f7f7f7fu) + 0x01010101u;
}

// Is one of the seven scale bytes larger than kLargestSingleScale = 0x86? The eighth is not looked at.
__device__ __forceinline__ bool has_large_scale(uint2 scales) {
  const uint32_t low = ((scales.x & 0x7f7f7f7fu) + 0x79797979u) & scales.x;
  const uint32_t high = ((scales.y & 0x7f7f7f7fu) + 0x79797979u) & scales.y;
  return ((low | (high & 0x00ffffffu)) & 0x80808080u) != 0;
}

// Four codes times 2^-120 as two pairs of bf16. A code spread to 16 bits by its sign, times 16, has everything where it
// belongs, and copies of the sign in the bits that are then cleared.
__device__ __forceinline__ uint2 place_codes(uint32_t codes) {
  return make_uint2(ptx::prmt<0x9180>(codes) * 16 & kPlacedPair, ptx::prmt<0xb3a2>(codes) * 16 & kPlacedPair);
}

// Eight codes times the first factor of their scale.
__device__ __forceinline__ uint4 dequantise(uint32_t codes0, uint32_t codes1, uint32_t scale) {
  const uint2 a = place_codes(codes0), b = place_codes(codes1);
  return make_uint4(ptx::mul_bf16x2(a.x, scale), ptx::mul_bf16x2(a.y, scale), ptx::mul_bf16x2(b.x, scale),
                    ptx::mul_bf16x2(b.y, scale));
}

__device__ __forceinline__ uint4 times(uint4 v, uint32_t scale) {
  return make_uint4(ptx::mul_bf16x2(v.x, scale), ptx::mul_bf16x2(v.y, scale), ptx::mul_bf16x2(v.z, scale),
                    ptx::mul_bf16x2(v.w, scale));
}

}  // namespace sgl_dsv4::sm90
