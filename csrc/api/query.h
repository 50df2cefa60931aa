// The query's op: argument checks -> QueryParams -> launcher. Shapes and semantics: decode/query.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "decode/query.h"

namespace sgl_dsv4::api {

// Checks a query [T, h, 512]; its device.
int32_t check_query(const torch::stable::Tensor& q);

// What the caller wants done to a query of `tokens` rows: checks, and how a kernel takes it.
QueryPrologue make_prologue(std::optional<double> norm_eps, const std::optional<torch::stable::Tensor>& freqs_cis,
                            const std::optional<torch::stable::Tensor>& positions, int64_t tokens, int32_t device);

void query_norm_rope(torch::stable::Tensor q, std::optional<double> norm_eps,
                     std::optional<torch::stable::Tensor> freqs_cis, std::optional<torch::stable::Tensor> positions,
                     bool pdl, torch::stable::Tensor out);

}  // namespace sgl_dsv4::api
