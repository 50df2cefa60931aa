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

void check_rope(const OptionalTensor& freqs_cis, const OptionalTensor& positions, int64_t tokens, int32_t device);

// A RoPE table and the positions of `tokens` tokens: checks, and the fields of CombineParams or QueryPrologue that a
// kernel reads them by. Without them the fields stay as they are.
template <typename Params>
void fill_rope(const OptionalTensor& freqs_cis, const OptionalTensor& positions, int64_t tokens, int32_t device,
               Params* params) {
  check_rope(freqs_cis, positions, tokens, device);
  if (!freqs_cis) return;
  // An empty table has no data pointer, and then every position is outside it: nothing is read through this one.
  static const float nowhere = 0.0f;
  params->freqs_cis = static_cast<const float*>(freqs_cis->data_ptr());
  if (params->freqs_cis == nullptr) params->freqs_cis = &nowhere;
  params->positions = positions->data_ptr();
  params->num_freqs = freqs_cis->size(0);
  params->positions_are_int64 = positions->scalar_type() == ScalarType::Long;
  params->stride_freqs_position = freqs_cis->stride(0);
  params->stride_positions_token = positions->stride(0);
}

// Sink, inverse RoPE and outputs: everything of `params` but the partials and the sizes.
void fill_epilogue(const OptionalTensor& attn_sink, const OptionalTensor& freqs_cis, const OptionalTensor& positions,
                   int64_t output, const Tensor& out, const Tensor& lse, const OptionalTensor& scales,
                   const OptionalTensor& amax, const RowsAndHeads& n, CombineParams* params);

}  // namespace sgl_dsv4::api
