// The combine op: argument checks -> CombineParams -> launcher. Shapes and semantics: decode/decode.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace sgl_dsv4::api {

void combine_splits(torch::stable::Tensor o_accum, torch::stable::Tensor lse_accum,
                    std::optional<torch::stable::Tensor> attn_sink, std::optional<torch::stable::Tensor> freqs_cis,
                    std::optional<torch::stable::Tensor> positions, int64_t output, bool pdl, torch::stable::Tensor out,
                    torch::stable::Tensor lse, std::optional<torch::stable::Tensor> scales,
                    std::optional<torch::stable::Tensor> amax);

}  // namespace sgl_dsv4::api
