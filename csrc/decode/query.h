// The query before the decode: RMSNorm of each head without a weight, then RoPE of its last 64 values. Parameters, and
// the launcher of a kernel that does nothing else. No torch here.
//
// The bits are those of SGLang's fused_q_norm_rope: query.cuh has the order of operations.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sgl_dsv4 {

// What is done to the query of T tokens: norm, rotation, both or neither. Strides in elements.
struct QueryPrologue {
  const float* freqs_cis;  // (num_freqs, 64) fp32: 32 (cos, sin) a position, 8-byte aligned; nullptr = no rotation
  const void* positions;   // (T) int32 or int64; one outside [0, num_freqs) gives NaN in the last 64 values
  int64_t num_freqs;
  int64_t stride_freqs_position;  // even
  int64_t stride_positions_token;
  float eps;
  bool has_norm;
  bool positions_are_int64;
};

// T = num_tokens, h = num_heads. Strides in elements; stride of the last dimension is 1.
struct QueryParams {
  const void* q;  // (T, h, 512) bf16
  void* out;      // (T, h, 512) bf16; does not overlap q
  QueryPrologue prologue;
  int64_t stride_q_token;
  int64_t stride_q_head;
  int64_t stride_out_token;
  int64_t stride_out_head;
  uint32_t num_tokens;
  uint32_t num_heads;
};

// Enqueues on `stream` of the current device. T * h = 0 launches nothing; T * h is at most 2^31 - 1. `aligned`: q, out
// and freqs_cis, their tokens, heads and rows start at multiples of 16 bytes.
cudaError_t launch_query_norm_rope(const QueryParams& params, bool aligned, bool pdl, cudaStream_t stream);

}  // namespace sgl_dsv4
