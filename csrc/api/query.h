// The query's op: argument checks -> QueryParams -> launcher. Shapes and semantics: decode/query.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace sgl_dsv4::api {

void query_norm_rope(torch::stable::Tensor q, std::optional<double> norm_eps,
                     std::optional<torch::stable::Tensor> freqs_cis, std::optional<torch::stable::Tensor> positions,
                     bool pdl, torch::stable::Tensor out);

}  // namespace sgl_dsv4::api
