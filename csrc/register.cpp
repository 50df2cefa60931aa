// Schemas and implementations of the torch ops; nothing else. The CPU implementations are registered from Python
// (sgl_dsv4_kernels/ops), where the plain-torch twins live.
#include <torch/csrc/stable/library.h>

#include "api/build_info.h"
#ifdef SGL_DSV4_CUDA
#include "api/combine.h"
#include "api/norm_rope_store.h"
#include "api/query.h"
#endif
#ifdef SGL_DSV4_SM90
#include "api/sparse_decode_sm90.h"
#endif

STABLE_TORCH_LIBRARY(sgl_dsv4_kernels, m) {
  m.def(
      "norm_rope_store(Tensor kv, Tensor weight, float eps, Tensor freqs_cis, Tensor positions, Tensor slots, "
      "Tensor(a!) cache, int page_size, int layout, int tokens_per_block, bool pdl) -> ()");
  m.def(
      "compress_norm_rope_store(Tensor kv, Tensor plan, Tensor weight, float eps, Tensor freqs_cis, Tensor slots, "
      "Tensor(a!) cache, int page_size, int compress_ratio, bool is_decode, int layout, int tokens_per_block, "
      "bool pdl) -> ()");
  m.def(
      "sparse_decode(Tensor q, Tensor cache, Tensor indices, Tensor? topk_length, Tensor? extra_cache, "
      "Tensor? extra_indices, Tensor? extra_topk_length, int page_size, int extra_page_size, float softmax_scale, "
      "int layout, int extra_layout, bool batch_invariant, float? q_norm_eps, Tensor? q_freqs_cis, "
      "Tensor? q_positions, Tensor? attn_sink, Tensor? freqs_cis, Tensor? positions, "
      "int output, str backend, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? scales, Tensor(d!)? amax, "
      "Tensor(e!)? o_accum=None, Tensor(f!)? lse_accum=None, int num_splits=1) -> ()");
  m.def(
      "sparse_decode_partial(Tensor q, Tensor cache, Tensor indices, Tensor? topk_length, Tensor? extra_cache, "
      "Tensor? extra_indices, Tensor? extra_topk_length, int page_size, int extra_page_size, float softmax_scale, "
      "int layout, int extra_layout, bool batch_invariant, float? q_norm_eps, Tensor? q_freqs_cis, "
      "Tensor? q_positions, bool fill_empty, str backend, Tensor(a!) o_accum, Tensor(b!) lse_accum) -> ()");
  m.def(
      "combine_splits(Tensor o_accum, Tensor lse_accum, Tensor? attn_sink, Tensor? freqs_cis, Tensor? positions, "
      "int output, bool pdl, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? scales, Tensor(d!)? amax) -> ()");
  m.def(
      "query_norm_rope(Tensor q, float? norm_eps, Tensor? freqs_cis, Tensor? positions, bool pdl, Tensor(a!) out) "
      "-> ()");
#ifdef SGL_DSV4_SM90
  m.def(
      "sparse_decode_sm90(Tensor q, Tensor cache, Tensor indices, Tensor? topk_length, Tensor? extra_cache, "
      "Tensor? extra_indices, Tensor? extra_topk_length, int page_size, int extra_page_size, float softmax_scale, "
      "int block_heads, int num_splits, float? q_norm_eps, Tensor? q_freqs_cis, Tensor? q_positions, "
      "Tensor? attn_sink, Tensor? freqs_cis, Tensor? positions, int output, bool pdl, Tensor(a!) out, "
      "Tensor(b!) lse, Tensor(c!)? scales, Tensor(d!)? amax, Tensor(e!)? o_accum=None, Tensor(f!)? lse_accum=None) "
      "-> ()");
  m.def(
      "sparse_decode_partial_sm90(Tensor q, Tensor cache, Tensor indices, Tensor? topk_length, Tensor? extra_cache, "
      "Tensor? extra_indices, Tensor? extra_topk_length, int page_size, int extra_page_size, float softmax_scale, "
      "int block_heads, float? q_norm_eps, Tensor? q_freqs_cis, Tensor? q_positions, "
      "bool fill_empty, bool pdl, Tensor(a!) o_accum, Tensor(b!) lse_accum) -> ()");
#endif
  m.def("cache_layout_fact(int layout, str fact, int page_size) -> int");
  m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_dsv4_kernels, CompositeExplicitAutograd, m) {
  m.impl("cache_layout_fact", TORCH_BOX(&sgl_dsv4::api::cache_layout_fact));
  m.impl("build_info", TORCH_BOX(&sgl_dsv4::api::build_info));
}

#ifdef SGL_DSV4_CUDA
STABLE_TORCH_LIBRARY_IMPL(sgl_dsv4_kernels, CUDA, m) {
  m.impl("norm_rope_store", TORCH_BOX(&sgl_dsv4::api::norm_rope_store));
  m.impl("compress_norm_rope_store", TORCH_BOX(&sgl_dsv4::api::compress_norm_rope_store));
  m.impl("combine_splits", TORCH_BOX(&sgl_dsv4::api::combine_splits));
  m.impl("query_norm_rope", TORCH_BOX(&sgl_dsv4::api::query_norm_rope));
#ifdef SGL_DSV4_SM90
  m.impl("sparse_decode_sm90", TORCH_BOX(&sgl_dsv4::api::sparse_decode_sm90));
  m.impl("sparse_decode_partial_sm90", TORCH_BOX(&sgl_dsv4::api::sparse_decode_partial_sm90));
#endif
}
#endif
