// From the results of a block in shared memory to partials or outputs: a warp takes a head at a time.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ptx.cuh"
#include "decode/epilogue.cuh"
#include "decode/finish.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

// Sinks and the row's rotation, long before they are needed. Executed by at least kRopeDim threads.
__device__ __forceinline__ void load_epilogue_inputs(const CombineParams& p, const Part& w, int thread, float* sink,
                                                     float* rotation) {
  if (thread < w.heads) sink[thread] = p.attn_sink == nullptr ? kMinusInfinity : p.attn_sink[w.first_head + thread];
  if (p.freqs_cis == nullptr || thread >= kRopeDim) return;
  const int64_t position = finish::load_position(w.token, p);
  const bool inside = position >= 0 && position < p.num_freqs;
  rotation[thread] = inside ? p.freqs_cis[position * p.stride_freqs_position + thread] : NAN;
}

__device__ __forceinline__ float* lse_of(const DecodeParams& p, const Part& w, int head) {
  return p.lse_accum + w.split * p.stride_lse_split + w.token * p.stride_lse_token +
         (w.first_head + head) * p.stride_lse_head;
}

__device__ __forceinline__ float* o_of(const DecodeParams& p, const Part& w, int head) {
  return p.o_accum + w.split * p.stride_o_split + w.token * p.stride_o_token + (w.first_head + head) * p.stride_o_head;
}

// values: [heads][pitch]. unit, total: of each head; its weights are in units of 2^unit. Warps warp, warp + warps, ...
// take a head each. Without a weight the values do not count: 0 times an infinite key is NaN.
__device__ __forceinline__ void write_partials(const DecodeParams& p, const Part& w, const float* values, int pitch,
                                               const float* unit, const float* total, int warp, int warps) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int head = warp; head < w.heads; head += warps) {
    const float sum = total[head];
    const bool empty = sum == 0.0f;
    if (lane == 0) *lse_of(p, w, head) = empty ? kMinusInfinity : unit[head] + log2f(sum);
    const float inverse = 1.0f / (empty ? 1.0f : sum);
    float4* o = reinterpret_cast<float4*>(o_of(p, w, head));
    const float4* from = reinterpret_cast<const float4*>(values + head * pitch);
#pragma unroll
    for (int i = 0; i < kHeadDim / 128; ++i) {
      const float4 v = empty ? float4{} : from[32 * i + lane];
      o[32 * i + lane] = make_float4(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
    }
  }
}

// The same for one split: sink, inverse RoPE, amax, rounding.
__device__ __forceinline__ void write_outputs(const CombineParams& p, const Part& w, const float* values, int pitch,
                                              const float* unit, const float* total, const float* sink,
                                              const float* rotation, int warp, int warps) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int head = warp; head < w.heads; head += warps) {
    const float sum = total[head];
    const bool empty = sum == 0.0f;
    const float lse = empty ? INFINITY : finish::natural_lse(unit[head], sum);
    const float factor = epilogue::sink_factor(sink[head], lse);
    const float inverse = 1.0f / (empty ? 1.0f : sum);
    uint32_t amax = 0;
#pragma unroll
    for (int group = 0; group < finish::kGroups; ++group) {
      const int channel = group * finish::kGroupChannels + lane * finish::kVec;
      const finish::Place place = {w.token, w.first_head + head, group, lane, channel};
      const float4 v = empty ? float4{} : *reinterpret_cast<const float4*>(values + head * pitch + channel);
      float x[finish::kVec] = {v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse};
      if (!empty) {
        finish::Rotation turn = {};
        if (finish::rotates(place, p)) {
          const float4 f = *reinterpret_cast<const float4*>(rotation + channel - kNopeDim);
          turn = {{make_float2(f.x, f.y), make_float2(f.z, f.w)}};
        }
        finish::apply_sink_and_rope(x, factor, turn, place, p);
      }
      finish::store_output(x, place, p);
      amax = max(amax, epilogue::abs_max_bits(x));
    }
    if (lane == 0) p.lse[w.token * p.stride_lse_token + (w.first_head + head) * p.stride_lse_head] = lse;
    if (p.amax == nullptr) continue;
    amax = epilogue::lanes_max<32>(amax);
    if (lane == 0)
      p.amax[w.token * p.stride_amax_token + (w.first_head + head) * p.stride_amax_head] = __uint_as_float(amax);
  }
}

// A block without keys: the LSE, and zeros where they are asked for.
__device__ __forceinline__ void write_empty(const DecodeParams& p, const Part& w, int warp, int warps) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int head = warp; head < w.heads; head += warps) {
    if (p.o_accum == nullptr) {
      const float zeros[finish::kVec] = {};
      for (int group = 0; group < finish::kGroups; ++group)
        finish::store_output(
            zeros, {w.token, w.first_head + head, group, lane, group * finish::kGroupChannels + lane * finish::kVec},
            p.finish);
      if (lane != 0) continue;
      const CombineParams& f = p.finish;
      f.lse[w.token * f.stride_lse_token + (w.first_head + head) * f.stride_lse_head] = INFINITY;
      if (f.amax != nullptr) f.amax[w.token * f.stride_amax_token + (w.first_head + head) * f.stride_amax_head] = 0.0f;
    } else {
      if (lane == 0) *lse_of(p, w, head) = kMinusInfinity;
      if (!p.fill_empty) continue;
      for (int i = lane; i < kHeadDim / 4; i += 32)
        reinterpret_cast<float4*>(o_of(p, w, head))[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
}

}  // namespace sgl_dsv4::sm90
