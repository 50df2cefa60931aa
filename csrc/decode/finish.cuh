// From the merged fp32 values of a head to the outputs, for a warp that holds one or more groups of 128 channels, 4
// a lane of each: a group is one fp8 group of 128, eight lanes one of 32. decode.h has the order and the rules,
// epilogue.cuh the arithmetic.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/cache_layout.h"
#include "decode/decode.h"
#include "decode/epilogue.cuh"

namespace sgl_dsv4::finish {

inline constexpr int kVec = 4;  // channels a lane
inline constexpr int kGroupChannels = 32 * kVec;
inline constexpr int kGroups = kHeadDim / kGroupChannels;
static_assert(kGroupChannels == 128);

// Which part of the work a thread has.
struct Place {
  int64_t token;
  int64_t head;
  int group;  // of 128 channels, the warp's first
  int lane;
  int channel;       // first of kVec, in that group
  bool dry = false;  // nothing is read or written: combine.cu
};

// most * ln 2 + ln(sum), ln 2 in two parts: one rounding.
__device__ __forceinline__ float natural_lse(float most, float sum) {
  constexpr float kLn2High = 0.693147182464599609375f, kLn2Low = -1.904654299957768e-9f;
  return fmaf(most, kLn2High, fmaf(most, kLn2Low, logf(sum)));
}

// ---- inverse RoPE ----

// (cos, sin) of a thread's two pairs; outside the last kRopeDim channels it is not used.
struct Rotation {
  float2 pair[kVec / 2];
};

__device__ __forceinline__ bool rotates(const Place& place, const CombineParams& p) {
  return p.freqs_cis != nullptr && place.channel >= kNopeDim;
}

// Of a row that is rotated.
__device__ __forceinline__ int64_t load_position(int64_t token, const CombineParams& p) {
  const int64_t at = token * p.stride_positions_token;
  return p.positions_are_int64 ? static_cast<const int64_t*>(p.positions)[at]
                               : static_cast<const int32_t*>(p.positions)[at];
}

__device__ __forceinline__ int64_t load_position(const Place& place, const CombineParams& p) {
  if (place.dry || !rotates(place, p)) return 0;
  return load_position(place.token, p);
}

__device__ __forceinline__ Rotation load_rotation(const Place& place, int64_t position, const CombineParams& p) {
  const float2 nan = make_float2(NAN, NAN);
  Rotation r = {{nan, nan}};
  if (!place.dry && rotates(place, p) && position >= 0 && position < p.num_freqs) {
    const float* row = p.freqs_cis + position * p.stride_freqs_position + (place.channel - kNopeDim);
    r.pair[0] = reinterpret_cast<const float2*>(row)[0];
    r.pair[1] = reinterpret_cast<const float2*>(row)[1];
  }
  return r;
}

// Not for a row that attends to nothing: it stays 0, whatever its sink and position are.
__device__ __forceinline__ void apply_sink(float (&x)[kVec], float sink_factor) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] *= sink_factor;
}
__device__ __forceinline__ void apply_sink_and_rope(float (&x)[kVec], float sink_factor, const Rotation& rotation,
                                                    const Place& place, const CombineParams& p) {
  apply_sink(x, sink_factor);
  if (!rotates(place, p)) return;
  epilogue::rotate_back(x[0], x[1], rotation.pair[0].x, rotation.pair[0].y);
  epilogue::rotate_back(x[2], x[3], rotation.pair[1].x, rotation.pair[1].y);
}

// ---- outputs ----
//
// Of kCount groups of 128 channels each, from place.group on: x[i] is the thread's part of group place.group + i.

template <int kCount>
using Values = float[kCount][kVec];

template <int kCount>
__device__ __forceinline__ void store_bf16(const Values<kCount>& x, const Place& place, const CombineParams& p) {
  uint16_t* out =
      static_cast<uint16_t*>(p.out) + place.token * p.stride_out_token + place.head * p.stride_out_head + place.channel;
  uint2 packed[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    packed[i] = make_uint2(epilogue::cvt_bf16x2(x[i][0], x[i][1]), epilogue::cvt_bf16x2(x[i][2], x[i][3]));
  if (place.dry) return;
  if (reinterpret_cast<uintptr_t>(out) % sizeof(uint2) == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) *reinterpret_cast<uint2*>(out + i * kGroupChannels) = packed[i];
  } else {  // a caller's view may start anywhere
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out[i * kGroupChannels] = static_cast<uint16_t>(packed[i].x);
      out[i * kGroupChannels + 1] = static_cast<uint16_t>(packed[i].x >> 16);
      out[i * kGroupChannels + 2] = static_cast<uint16_t>(packed[i].y);
      out[i * kGroupChannels + 3] = static_cast<uint16_t>(packed[i].y >> 16);
    }
  }
}

// Column `column` of row place.token of the scales.
template <typename Word>
__device__ __forceinline__ Word* scale_at(const Place& place, int64_t column, const CombineParams& p) {
  return static_cast<Word*>(p.scales) + place.token * p.stride_scales_token + column * p.stride_scales_column;
}

// Quantises and stores the warp's channels with their scales.
template <int kCount>
__device__ __forceinline__ void store_fp8(const Values<kCount>& x, const Place& place, const CombineParams& p) {
  const bool stores_scale = place.lane == 0 && !place.dry;
  uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(p.out) + place.token * p.stride_out_token +
                                              place.head * p.stride_out_head + place.channel);
  const auto store_e4m3 = [&](int i, uint32_t codes) {
    if (!place.dry) out[i * kGroupChannels / kVec] = codes;
  };
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int group = place.group + i;
    const uint32_t amax = epilogue::finite_abs_max_bits(x[i]);
    if (p.output == OutputKind::kFp8Group32Ue8m0) {
      const epilogue::Ue8m0Scale scale(epilogue::lanes_max<32 / kVec>(amax));
      store_e4m3(i, epilogue::quantise4(x[i], scale));
      const uint32_t byte = scale.exponent << (place.lane / 8 * 8);
      const uint32_t word = __reduce_or_sync(kAllLanes, byte);
      if (stores_scale) *scale_at<uint32_t>(place, place.head * kGroups + group, p) = word;
      continue;
    }
    const uint32_t group_amax = epilogue::lanes_max<32>(amax);
    if (p.output == OutputKind::kFp8Group128) {
      const epilogue::Fp32Scale scale(group_amax);
      store_e4m3(i, epilogue::quantise4(x[i], scale));
      if (stores_scale) *scale_at<float>(place, place.head * kGroups + group, p) = scale.scale;
    } else {
      const epilogue::Ue8m0Scale scale(group_amax);
      store_e4m3(i, epilogue::quantise4(x[i], scale));
      uint8_t* word = reinterpret_cast<uint8_t*>(scale_at<uint32_t>(place, place.head, p));
      if (stores_scale) word[group] = static_cast<uint8_t>(scale.exponent);
    }
  }
}

// Both output kinds.
template <int kCount>
__device__ __forceinline__ void store_output(const Values<kCount>& x, const Place& place, const CombineParams& p) {
  if (p.output == OutputKind::kBf16) {
    store_bf16<kCount>(x, place, p);
  } else {
    store_fp8<kCount>(x, place, p);
  }
}

}  // namespace sgl_dsv4::finish
