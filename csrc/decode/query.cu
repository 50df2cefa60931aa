// RMSNorm and RoPE of the query as a kernel of its own: one warp a (token, head), its 512 values in two vectors of 16
// bytes a lane.
#include "decode/query.cuh"

#include "common/launch.h"
#include "common/ptx.cuh"
#include "decode/query.h"

namespace sgl_dsv4 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

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

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) query_norm_rope_kernel(const __grid_constant__ QueryParams p) {
  ptx::griddepcontrol_launch_dependents();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint32_t head_of_all = blockIdx.x * kWarps + threadIdx.x / 32;
  const uint32_t token = head_of_all / p.num_heads, head = head_of_all - token * p.num_heads;
  ptx::griddepcontrol_wait();
  if (token >= p.num_tokens) return;

  // All loads: position, values, then factors.
  const bool rotates = p.prologue.freqs_cis != nullptr && lane >= query::kFirstRopeLane;
  const query::Position position = query::load_position(p.prologue, token, rotates);
  const auto* from =
      static_cast<const __nv_bfloat16*>(p.q) + token * p.stride_q_token + head * p.stride_q_head + lane * query::kVec;
  query::Values values[1];
#pragma unroll
  for (int v = 0; v < query::kVectors; ++v)
    values[0].vector[v] = query::load_vector<kAligned>(from + v * (kHeadDim / query::kVectors));
  query::Factors factors = {};
  if (rotates) factors = query::load_factors<kAligned>(p.prologue, position, lane - query::kFirstRopeLane);

  if (p.prologue.has_norm) query::normalise(values, p.prologue.eps);
  if (rotates) query::rotate(values[0].vector[query::kVectors - 1], factors);

  auto* to =
      static_cast<__nv_bfloat16*>(p.out) + token * p.stride_out_token + head * p.stride_out_head + lane * query::kVec;
#pragma unroll
  for (int v = 0; v < query::kVectors; ++v)
    store_vector<kAligned>(to + v * (kHeadDim / query::kVectors), values[0].vector[v]);
}

cudaError_t load_kernels() {
  return once_a_device([] {
    for (auto* kernel : {query_norm_rope_kernel<false>, query_norm_rope_kernel<true>})
      if (cudaError_t err = load_code(kernel); err != cudaSuccess) return err;
    return cudaSuccess;
  });
}

}  // namespace

cudaError_t launch_query_norm_rope(const QueryParams& params, bool aligned, bool pdl, cudaStream_t stream) {
  const int64_t heads = static_cast<int64_t>(params.num_tokens) * params.num_heads;
  if (heads == 0) return cudaSuccess;
  if (heads > INT32_MAX) return cudaErrorInvalidValue;
  if (cudaError_t err = load_kernels(); err != cudaSuccess) return err;
  const auto kernel = aligned ? query_norm_rope_kernel<true> : query_norm_rope_kernel<false>;
  const dim3 grid(static_cast<unsigned>((heads + kWarps - 1) / kWarps));
  return launch_kernel(kernel, grid, dim3(kThreads), 0, pdl, stream, params);
}

}  // namespace sgl_dsv4
