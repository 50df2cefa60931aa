// The Hopper decode op: argument checks -> sm90::DecodeParams -> launcher. Semantics: decode/decode.h. Present in
// builds for sm_90a alone.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace sgl_dsv4::api {

// Both take V4 caches only; extra_cache and extra_indices come together or not at all. The first runs the epilogue
// itself; of the last rows, as many as o_accum [S, rows, h, 512] and lse_accum [S, rows, h] have (bf16 outputs without
// amax), it writes the partials of every split, and no outputs; else num_splits is 1, or 2 if these are to be merged on
// chip (fewer than 64 heads a block, no amax). The second writes partials of all rows. block_heads: 8,
// 16, 32 or 64, how heads are dealt to blocks. q_norm_eps, q_freqs_cis, q_positions: what is done to q first, as in
// query_norm_rope.
void sparse_decode_sm90(torch::stable::Tensor q, torch::stable::Tensor cache, torch::stable::Tensor indices,
                        std::optional<torch::stable::Tensor> topk_length,
                        std::optional<torch::stable::Tensor> extra_cache,
                        std::optional<torch::stable::Tensor> extra_indices,
                        std::optional<torch::stable::Tensor> extra_topk_length, int64_t page_size,
                        int64_t extra_page_size, double softmax_scale, int64_t block_heads, int64_t num_splits,
                        std::optional<double> q_norm_eps, std::optional<torch::stable::Tensor> q_freqs_cis,
                        std::optional<torch::stable::Tensor> q_positions,
                        std::optional<torch::stable::Tensor> attn_sink, std::optional<torch::stable::Tensor> freqs_cis,
                        std::optional<torch::stable::Tensor> positions, int64_t output, bool pdl,
                        torch::stable::Tensor out, torch::stable::Tensor lse,
                        std::optional<torch::stable::Tensor> scales, std::optional<torch::stable::Tensor> amax,
                        std::optional<torch::stable::Tensor> o_accum, std::optional<torch::stable::Tensor> lse_accum);

void sparse_decode_partial_sm90(torch::stable::Tensor q, torch::stable::Tensor cache, torch::stable::Tensor indices,
                                std::optional<torch::stable::Tensor> topk_length,
                                std::optional<torch::stable::Tensor> extra_cache,
                                std::optional<torch::stable::Tensor> extra_indices,
                                std::optional<torch::stable::Tensor> extra_topk_length, int64_t page_size,
                                int64_t extra_page_size, double softmax_scale, int64_t block_heads,
                                std::optional<double> q_norm_eps, std::optional<torch::stable::Tensor> q_freqs_cis,
                                std::optional<torch::stable::Tensor> q_positions, bool fill_empty, bool pdl,
                                torch::stable::Tensor o_accum, torch::stable::Tensor lse_accum);

}  // namespace sgl_dsv4::api
