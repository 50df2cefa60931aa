#include "api/combine.h"

#include <limits>

#include "api/device.h"
#include "api/tensor_checks.h"
#include "common/cache_layout.h"
#include "decode/decode.h"

namespace sgl_dsv4::api {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kGroupsPerHead128 = kHeadDim / 128;

// S, T and h, which all tensors share.
struct Sizes {
  int64_t splits;
  int64_t tokens;
  int64_t heads;
  int32_t device;
};

int64_t align4(int64_t n) {
  return (n + 3) / 4 * 4;
}

// Data start and the strides that matter are multiples of `elements` elements: what a vector access needs.
void check_vector_access(const char* name, const Tensor& t, int64_t elements) {
  if (t.numel() == 0) return;
  const int64_t bytes = elements * t.element_size();
  check(reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes == 0, name, ": expected data that starts at a multiple of ",
        bytes, " bytes");
  for (int64_t d = 0; d + 1 < t.dim(); ++d)
    check(t.size(d) <= 1 || t.stride(d) % elements == 0, name, ": expected stride(", d, ") to be a multiple of ",
          elements, ", got ", t.stride(d));
}

OutputKind parse_output(int64_t output) {
  check(output >= 0 && output <= 3,
        "output: expected 0 (bf16), 1 (fp8_group128), 2 (fp8_group128_ue8m0) or 3 (fp8_group32_ue8m0), got ", output);
  return static_cast<OutputKind>(output);
}

Sizes fill_partials(const Tensor& o_accum, const Tensor& lse_accum, CombineParams* params) {
  const int32_t device = o_accum.get_device_index();
  check_cuda_device("o_accum", o_accum, device);
  check_shape("o_accum", o_accum, {kAny, kAny, kAny, kHeadDim});
  check_dtype("o_accum", o_accum, {ScalarType::Float});
  check_stride("o_accum", o_accum, 3, 1);
  check_vector_access("o_accum", o_accum, 4);
  const Sizes n = {o_accum.size(0), o_accum.size(1), o_accum.size(2), device};
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  check(n.splits >= 1 && n.splits <= kMax, "o_accum: expected 1 to 2^31 - 1 splits, got ", n.splits);
  check(n.heads >= 1 && n.heads <= kMax, "o_accum: expected 1 to 2^31 - 1 heads, got ", n.heads);
  check(n.tokens <= kMax / n.heads, "o_accum: expected T * h below 2^31, got ", n.tokens, " * ", n.heads);

  check_cuda_device("lse_accum", lse_accum, device);
  check_shape("lse_accum", lse_accum, {n.splits, n.tokens, n.heads});
  check_dtype("lse_accum", lse_accum, {ScalarType::Float});

  params->o_accum = static_cast<const float*>(o_accum.data_ptr());
  params->lse_accum = static_cast<const float*>(lse_accum.data_ptr());
  params->num_splits = static_cast<int32_t>(n.splits);
  params->num_tokens = static_cast<int32_t>(n.tokens);
  params->num_heads = static_cast<int32_t>(n.heads);
  params->stride_o_accum_split = o_accum.stride(0);
  params->stride_o_accum_token = o_accum.stride(1);
  params->stride_o_accum_head = o_accum.stride(2);
  params->stride_lse_accum_split = lse_accum.stride(0);
  params->stride_lse_accum_token = lse_accum.stride(1);
  params->stride_lse_accum_head = lse_accum.stride(2);
  return n;
}

void fill_sink_and_rope(const OptionalTensor& attn_sink, const OptionalTensor& freqs_cis,
                        const OptionalTensor& positions, const Sizes& n, CombineParams* params) {
  if (attn_sink) {
    check_cuda_device("attn_sink", *attn_sink, n.device);
    check_shape("attn_sink", *attn_sink, {n.heads});
    check_dtype("attn_sink", *attn_sink, {ScalarType::Float});
    check_stride("attn_sink", *attn_sink, 0, 1);
    params->attn_sink = static_cast<const float*>(attn_sink->data_ptr());
  }
  check(freqs_cis.has_value() == positions.has_value(), "freqs_cis and positions: expected both or neither, got only ",
        freqs_cis ? "freqs_cis" : "positions");
  if (!freqs_cis) return;
  check_cuda_device("freqs_cis", *freqs_cis, n.device);
  check_shape("freqs_cis", *freqs_cis, {kAny, kRopeDim});
  check_dtype("freqs_cis", *freqs_cis, {ScalarType::Float});
  check_stride("freqs_cis", *freqs_cis, 1, 1);
  check_vector_access("freqs_cis", *freqs_cis, 2);
  check_cuda_device("positions", *positions, n.device);
  check_shape("positions", *positions, {n.tokens});
  check_dtype("positions", *positions, {ScalarType::Int, ScalarType::Long});
  params->freqs_cis = static_cast<const float*>(freqs_cis->data_ptr());
  params->positions = positions->data_ptr();
  params->num_freqs = freqs_cis->size(0);
  // An empty table has no data pointer, and then every position is outside it: nothing is read through this one.
  if (params->freqs_cis == nullptr) params->freqs_cis = params->o_accum;
  params->positions_are_int64 = positions->scalar_type() == ScalarType::Long;
  params->stride_freqs_position = freqs_cis->stride(0);
  params->stride_positions_token = positions->stride(0);
}

void fill_scales(const OptionalTensor& scales, const Sizes& n, CombineParams* params) {
  if (params->output == OutputKind::kBf16) {
    check(!scales.has_value(), "scales: expected None for output bf16, got a tensor");
    return;
  }
  check(scales.has_value(), "scales: expected a tensor for an fp8 output, got None");
  check_cuda_device("scales", *scales, n.device);
  if (params->output == OutputKind::kFp8Group128Ue8m0) {
    check_shape("scales", *scales, {n.tokens, n.heads});
    check_dtype("scales", *scales, {ScalarType::Int});
    check_stride("scales", *scales, 1, 1);
    check_stride("scales", *scales, 0, n.heads);
  } else {  // a column per group, rows padded to 16 bytes: what a TMA descriptor takes
    check_shape("scales", *scales, {n.tokens, n.heads * kGroupsPerHead128});
    check_dtype("scales", *scales, {params->output == OutputKind::kFp8Group128 ? ScalarType::Float : ScalarType::Int});
    if (n.tokens > 0) {  // torch gives an empty tensor other strides
      check_stride("scales", *scales, 0, 1);
      check_stride("scales", *scales, 1, align4(n.tokens));
    }
  }
  params->scales = scales->data_ptr();
  params->stride_scales_token = scales->stride(0);
  params->stride_scales_column = scales->stride(1);
}

void fill_outputs(int64_t output, const Tensor& out, const Tensor& lse, const OptionalTensor& scales,
                  const OptionalTensor& amax, const Sizes& n, CombineParams* params) {
  params->output = parse_output(output);
  check_cuda_device("out", out, n.device);
  check_shape("out", out, {n.tokens, n.heads, kHeadDim});
  check_stride("out", out, 2, 1);
  if (params->output == OutputKind::kBf16) {
    check_dtype("out", out, {ScalarType::BFloat16});
  } else {
    check_dtype("out", out, {ScalarType::Float8_e4m3fn});
    check_vector_access("out", out, 4);
  }
  params->out = out.data_ptr();
  params->stride_out_token = out.stride(0);
  params->stride_out_head = out.stride(1);
  fill_scales(scales, n, params);

  check_cuda_device("lse", lse, n.device);
  check_shape("lse", lse, {n.tokens, n.heads});
  check_dtype("lse", lse, {ScalarType::Float});
  params->lse = static_cast<float*>(lse.data_ptr());
  params->stride_lse_token = lse.stride(0);
  params->stride_lse_head = lse.stride(1);

  if (!amax) return;
  check_cuda_device("amax", *amax, n.device);
  check_shape("amax", *amax, {n.tokens, n.heads});
  check_dtype("amax", *amax, {ScalarType::Float});
  params->amax = static_cast<float*>(amax->data_ptr());
  params->stride_amax_token = amax->stride(0);
  params->stride_amax_head = amax->stride(1);
}

}  // namespace

void combine_splits(Tensor o_accum, Tensor lse_accum, OptionalTensor attn_sink, OptionalTensor freqs_cis,
                    OptionalTensor positions, int64_t output, bool pdl, Tensor out, Tensor lse, OptionalTensor scales,
                    OptionalTensor amax) {
  CombineParams params = {};
  const Sizes n = fill_partials(o_accum, lse_accum, &params);
  fill_sink_and_rope(attn_sink, freqs_cis, positions, n, &params);
  fill_outputs(output, out, lse, scales, amax, n, &params);
  if (n.tokens == 0) return;
  const DeviceGuard guard(n.device);
  require_device_code(n.device);
  check_launch("combine_splits", launch_combine(params, pdl, current_stream(n.device)));
}

}  // namespace sgl_dsv4::api
