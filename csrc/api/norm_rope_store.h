// The two store ops: argument checks -> StoreParams -> launcher. Shapes and semantics: sgl_dsv4_kernels/ops/store.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace sgl_dsv4::api {

void norm_rope_store(torch::stable::Tensor kv, torch::stable::Tensor weight, double eps,
                     torch::stable::Tensor freqs_cis, torch::stable::Tensor positions, torch::stable::Tensor slots,
                     torch::stable::Tensor cache, int64_t page_size, int64_t layout, int64_t tokens_per_block,
                     bool pdl);

void compress_norm_rope_store(torch::stable::Tensor kv, torch::stable::Tensor plan, torch::stable::Tensor weight,
                              double eps, torch::stable::Tensor freqs_cis, torch::stable::Tensor slots,
                              torch::stable::Tensor cache, int64_t page_size, int64_t compress_ratio, bool is_decode,
                              int64_t layout, int64_t tokens_per_block, bool pdl);

}  // namespace sgl_dsv4::api
