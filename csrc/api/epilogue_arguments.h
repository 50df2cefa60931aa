// The arguments of the decode epilogue, shared by the ops that run it: checks, and their part of CombineParams.
#pragma once

#include <optional>

#include "api/tensor_checks.h"
#include "decode/decode.h"

namespace sgl_dsv4::api {

using OptionalTensor = std::optional<Tensor>;

struct RowsAndHeads {
  int64_t tokens;
  int64_t heads;
  int32_t device;
};

// Data start and the strides that matter are multiples of `elements` elements: what a vector access needs.
inline void check_vector_access(const char* name, const Tensor& t, int64_t elements) {
  if (t.numel() == 0) return;
  const int64_t bytes = elements * t.element_size();
  check(reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes == 0, name, ": expected data that starts at a multiple of ",
        bytes, " bytes");
  for (int64_t d = 0; d + 1 < t.dim(); ++d)
    check(t.size(d) <= 1 || t.stride(d) % elements == 0, name, ": expected stride(", d, ") to be a multiple of ",
          elements, ", got ", t.stride(d));
}

// A RoPE table and the rows of it that T tokens have: checks, and what a kernel reads them by.
struct RopeTable {
  const float* freqs_cis;
  const void* positions;
  int64_t num_freqs;
  bool positions_are_int64;
  int64_t stride_freqs_position;
  int64_t stride_positions_token;
};
void check_rope(const OptionalTensor& freqs_cis, const OptionalTensor& positions, int64_t tokens, int32_t device);
RopeTable rope_table(const Tensor& freqs_cis, const Tensor& positions);

// Sink, inverse RoPE and outputs: everything of `params` but the partials and the sizes.
void fill_epilogue(const OptionalTensor& attn_sink, const OptionalTensor& freqs_cis, const OptionalTensor& positions,
                   int64_t output, const Tensor& out, const Tensor& lse, const OptionalTensor& scales,
                   const OptionalTensor& amax, const RowsAndHeads& n, CombineParams* params);

}  // namespace sgl_dsv4::api
