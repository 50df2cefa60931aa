// From the results of a block in shared memory to partials or outputs: a warp takes a head at a time. (Partials of 8
// heads, and what blocks of several parts write: beside their roles.)
#pragma once

#include <cmath>
#include <cstdint>

#include "common/ptx.cuh"
#include "decode/epilogue.cuh"
#include "decode/finish.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

// The row's rotation, long before it is needed. Executed by at least kRopeDim threads.
__device__ __forceinline__ void load_rotation(const CombineParams& p, const Part& w, int thread, float* rotation) {
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

// ---- what is one number a head ----

// The head's sink in the natural log, -inf if there is none. Partials do not use it.
__device__ __forceinline__ float load_sink(const DecodeParams& p, const Part& w, int head) {
  const bool wanted = p.finish.attn_sink != nullptr && head < w.heads;
  return ptx::ld_global_if(wanted, p.finish.attn_sink + w.first_head + head, kMinusInfinity);
}

// What becomes of a head's results.
enum class Ends { kOutputs, kPartials, kPairs };

__device__ __forceinline__ Ends ends_of(bool partial) {
  return partial ? Ends::kPartials : Ends::kOutputs;
}

// Writes the LSE of a head whose weights sum up to `total` in units of 2^unit, and leaves in shared memory what its
// values are to be multiplied by: the inverse of the sum, 0 for an empty head (a sum is at most 2^17 times the number
// of keys: no other inverse is 0), and of outputs the sink's factor; of a pair's split, in its
// place, the LSE in log2.
template <typename Shared>
__device__ __forceinline__ void finish_head(const DecodeParams& p, const Part& w, Ends ends, int head, float unit,
                                            float total, float sink, Shared& shared) {
  const bool empty = total == 0.0f;
  shared.inverse[head] = empty ? 0.0f : 1.0f / total;
  if (head >= w.heads) return;
  if (ends == Ends::kPairs) {
    shared.factor[head] = empty ? kMinusInfinity : unit + log2f(total);
  } else if (ends == Ends::kPartials) {
    *lse_of(p, w, head) = empty ? kMinusInfinity : unit + log2f(total);
  } else {
    const float lse = empty ? INFINITY : finish::natural_lse(unit, total);
    shared.factor[head] = epilogue::sink_factor(sink, lse);
    p.finish.lse[w.token * p.finish.stride_lse_token + (w.first_head + head) * p.finish.stride_lse_head] = lse;
  }
}

// ---- the results of a block ----
//
// values: [heads][pitch], not yet divided by their sums. Warps warp, warp + warps, ... of the block take a head each, a
// lane 4 channels of each group of 128. The values of an empty head do not count: 0 times an infinite key is NaN.

__device__ __forceinline__ void load_values(finish::Values<finish::kGroups>& x, const float* row, int lane,
                                            float inverse) {
  float4 v[finish::kGroups];
#pragma unroll
  for (int i = 0; i < finish::kGroups; ++i) v[i] = reinterpret_cast<const float4*>(row)[32 * i + lane];
  if (inverse == 0.0f) {
#pragma unroll
    for (float4& zeros : v) zeros = float4{};
  }
#pragma unroll
  for (int i = 0; i < finish::kGroups; ++i) {
    x[i][0] = v[i].x * inverse;
    x[i][1] = v[i].y * inverse;
    x[i][2] = v[i].z * inverse;
    x[i][3] = v[i].w * inverse;
  }
}

template <typename Shared>
__device__ __forceinline__ void write_partials(const DecodeParams& p, const Part& w, const float* values, int pitch,
                                               const Shared& shared, int warp, int warps) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int head = warp; head < w.heads; head += warps) {
    finish::Values<finish::kGroups> x;
    load_values(x, values + head * pitch, lane, shared.inverse[head]);
    float4* o = reinterpret_cast<float4*>(o_of(p, w, head));
#pragma unroll
    for (int group = 0; group < finish::kGroups; ++group)
      o[32 * group + lane] = make_float4(x[group][0], x[group][1], x[group][2], x[group][3]);
  }
}

// The same for one split: sink, inverse RoPE, amax, rounding.
template <typename Shared>
__device__ __forceinline__ void write_outputs(const CombineParams& p, const Part& w, const float* values, int pitch,
                                              const Shared& shared, int warp, int warps) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kLast = finish::kGroups - 1;  // the group that is rotated
  finish::Place place = {w.token, w.first_head, 0, lane, lane * finish::kVec};
  finish::Place rotated = place;
  rotated.group = kLast;
  rotated.channel += kLast * finish::kGroupChannels;
  finish::Rotation turn = {};
  if (finish::rotates(rotated, p)) {
    const float4 f = *reinterpret_cast<const float4*>(shared.rotation + rotated.channel - kNopeDim);
    turn = {{make_float2(f.x, f.y), make_float2(f.z, f.w)}};
  }
  for (int head = warp; head < w.heads; head += warps) {
    finish::Values<finish::kGroups> x;
    const float inverse = shared.inverse[head], factor = shared.factor[head];
    load_values(x, values + head * pitch, lane, inverse);
    if (inverse != 0.0f) {
#pragma unroll
      for (int group = 0; group < kLast; ++group) finish::apply_sink(x[group], factor);
      finish::apply_sink_and_rope(x[kLast], factor, turn, rotated, p);
    }
    place.head = w.first_head + head;
    finish::store_output<finish::kGroups>(x, place, p);
    if (p.amax == nullptr) continue;
    uint32_t amax = 0;
#pragma unroll
    for (int group = 0; group < finish::kGroups; ++group) amax = max(amax, epilogue::abs_max_bits(x[group]));
    amax = epilogue::lanes_max<32>(amax);
    if (lane == 0) p.amax[w.token * p.stride_amax_token + place.head * p.stride_amax_head] = __uint_as_float(amax);
  }
}

// A split without keys: the LSE, and zeros where they are asked for.
__device__ __forceinline__ void write_empty_partial(const DecodeParams& p, const Part& w, int head, int lane) {
  if (lane == 0) *lse_of(p, w, head) = kMinusInfinity;
  if (!p.fill_empty) return;
  for (int i = lane; i < kHeadDim / 4; i += 32)
    reinterpret_cast<float4*>(o_of(p, w, head))[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// A block without keys.
__device__ __forceinline__ void write_empty(const DecodeParams& p, const Part& w, int warp, int warps) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int head = warp; head < w.heads; head += warps) {
    if (p.o_accum == nullptr) {
      const finish::Values<finish::kGroups> zeros = {};
      finish::store_output<finish::kGroups>(zeros, {w.token, w.first_head + head, 0, lane, lane * finish::kVec},
                                            p.finish);
      if (lane != 0) continue;
      const CombineParams& f = p.finish;
      f.lse[w.token * f.stride_lse_token + (w.first_head + head) * f.stride_lse_head] = INFINITY;
      if (f.amax != nullptr) f.amax[w.token * f.stride_amax_token + (w.first_head + head) * f.stride_amax_head] = 0.0f;
    } else {
      write_empty_partial(p, w, head, lane);
    }
  }
}

// A part without keys, of several of a block; bf16 outputs without amax.
__device__ __forceinline__ void write_empty_part(const DecodeParams& p, const Part& w, bool whole, int lane, int warp,
                                                 int warps) {
  const CombineParams& f = p.finish;
#pragma unroll 1
  for (int head = warp; head < w.heads; head += warps) {
    if (!whole) {
      write_empty_partial(p, w, head, lane);
      continue;
    }
    const finish::Values<finish::kGroups> zeros = {};
    finish::store_bf16<finish::kGroups>(zeros, {w.token, w.first_head + head, 0, lane, lane * finish::kVec}, f);
    if (lane == 0) f.lse[w.token * f.stride_lse_token + (w.first_head + head) * f.stride_lse_head] = INFINITY;
  }
}

// The same as a function: inlined it lies between the query's code and that of the attending warps.
__device__ __noinline__ void write_empty_apart(const DecodeParams& p, const Part& w, int warp, int warps) {
  write_empty(p, w, warp, warps);
}

}  // namespace sgl_dsv4::sm90
