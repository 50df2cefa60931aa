// RMSNorm and RoPE of the query as a kernel of its own, for decodes that cannot fuse it: one warp a (token, head), its
// 512 values in two vectors of 16 bytes a lane.
#include "decode/query.cuh"

#include <atomic>

#include "common/launch.h"
#include "common/ptx.cuh"
#include "decode/query.h"

namespace sgl_dsv4 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

// Eight bf16.
template <bool kAligned>
__device__ __forceinline__ Words<query::kPairs> load_vector(const __nv_bfloat16* from) {
  if constexpr (kAligned) return *reinterpret_cast<const Words<query::kPairs>*>(from);
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
  Words<query::kPairs> v;
#pragma unroll
  for (int i = 0; i < query::kPairs; ++i) v.word[i] = bits[2 * i] | static_cast<uint32_t>(bits[2 * i + 1]) << 16;
  return v;
}

template <bool kAligned>
__device__ __forceinline__ void store_vector(__nv_bfloat16* to, const Words<query::kPairs>& v) {
  if constexpr (kAligned) {
    *reinterpret_cast<Words<query::kPairs>*>(to) = v;
  } else {
    uint16_t* bits = reinterpret_cast<uint16_t*>(to);
#pragma unroll
    for (int i = 0; i < query::kVec; ++i) bits[i] = static_cast<uint16_t>(v.word[i / 2] >> (i % 2 * 16));
  }
}

__device__ __forceinline__ int64_t load_position(const QueryParams& p, uint32_t token) {
  const int64_t at = token * p.stride_positions_token;
  return p.positions_are_int64 ? static_cast<const int64_t*>(p.positions)[at]
                               : static_cast<const int32_t*>(p.positions)[at];
}

// `row`: of this position; nullptr gives NaN.
template <bool kAligned>
__device__ __forceinline__ query::Factors load_factors(const float* row, int lane) {
  query::Factors factors;
#pragma unroll
  for (int i = 0; i < query::kPairs; ++i) factors.pair[i] = make_float2(NAN, NAN);
  if (row == nullptr) return factors;
  row += (lane - query::kFirstRopeLane) * query::kVec;
#pragma unroll
  for (int i = 0; i < query::kPairs; i += 2) {
    if constexpr (kAligned) {
      const float4 two = *reinterpret_cast<const float4*>(row + 2 * i);
      factors.pair[i] = make_float2(two.x, two.y);
      factors.pair[i + 1] = make_float2(two.z, two.w);
    } else {
      factors.pair[i] = make_float2(row[2 * i], row[2 * i + 1]);
      factors.pair[i + 1] = make_float2(row[2 * i + 2], row[2 * i + 3]);
    }
  }
  return factors;
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) query_norm_rope_kernel(const __grid_constant__ QueryParams p) {
  ptx::griddepcontrol_launch_dependents();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint32_t head_of_all = blockIdx.x * kWarps + threadIdx.x / 32;
  const uint32_t token = head_of_all / p.num_heads, head = head_of_all - token * p.num_heads;
  ptx::griddepcontrol_wait();
  if (token >= p.num_tokens) return;

  // All loads: position, values, then factors.
  const bool rotates = p.freqs_cis != nullptr && lane >= query::kFirstRopeLane;
  const int64_t position = rotates ? load_position(p, token) : 0;
  const auto* from =
      static_cast<const __nv_bfloat16*>(p.q) + token * p.stride_q_token + head * p.stride_q_head + lane * query::kVec;
  query::Values values;
#pragma unroll
  for (int v = 0; v < query::kVectors; ++v)
    values.vector[v] = load_vector<kAligned>(from + v * (kHeadDim / query::kVectors));
  query::Factors factors = {};
  if (rotates) {
    const bool inside = position >= 0 && position < p.num_freqs;
    factors = load_factors<kAligned>(inside ? p.freqs_cis + position * p.stride_freqs_position : nullptr, lane);
  }

  if (p.has_norm) query::normalise(values, p.eps);
  if (rotates) query::rotate(values, factors);

  auto* to =
      static_cast<__nv_bfloat16*>(p.out) + token * p.stride_out_token + head * p.stride_out_head + lane * query::kVec;
#pragma unroll
  for (int v = 0; v < query::kVectors; ++v)
    store_vector<kAligned>(to + v * (kHeadDim / query::kVectors), values.vector[v]);
}

// Loads both kernels' code on the current device: a first call inside a graph capture may not.
cudaError_t query_device_code() {
  static std::atomic<bool> loaded[kMaxDevices];
  int device = 0;
  if (cudaError_t err = cudaGetDevice(&device); err != cudaSuccess) return err;
  if (device < kMaxDevices && loaded[device].load(std::memory_order_relaxed)) return cudaSuccess;
  for (auto* kernel : {query_norm_rope_kernel<false>, query_norm_rope_kernel<true>}) {
    cudaFuncAttributes attributes;
    if (cudaError_t err = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)); err != cudaSuccess)
      return err;
  }
  if (device < kMaxDevices) loaded[device].store(true, std::memory_order_relaxed);
  return cudaSuccess;
}

}  // namespace

cudaError_t launch_query_norm_rope(const QueryParams& params, bool aligned, bool pdl, cudaStream_t stream) {
  const int64_t heads = static_cast<int64_t>(params.num_tokens) * params.num_heads;
  if (heads == 0) return cudaSuccess;
  if (heads > INT32_MAX) return cudaErrorInvalidValue;
  if (cudaError_t err = query_device_code(); err != cudaSuccess) return err;
  const auto kernel = aligned ? query_norm_rope_kernel<true> : query_norm_rope_kernel<false>;
  const dim3 grid(static_cast<unsigned>((heads + kWarps - 1) / kWarps));
  return launch_kernel(kernel, grid, dim3(kThreads), 0, pdl, stream, params);
}

}  // namespace sgl_dsv4
