#include "api/epilogue_arguments.h"

#include "common/cache_layout.h"

namespace sgl_dsv4::api {
namespace {

constexpr int64_t kGroupsPerHead128 = kHeadDim / 128;

int64_t align4(int64_t n) {
  return (n + 3) / 4 * 4;
}

OutputKind parse_output(int64_t output) {
  check(output >= 0 && output <= 3,
        "output: expected 0 (bf16), 1 (fp8_group128), 2 (fp8_group128_ue8m0) or 3 (fp8_group32_ue8m0), got ", output);
  return static_cast<OutputKind>(output);
}

void fill_sink_and_rope(const OptionalTensor& attn_sink, const OptionalTensor& freqs_cis,
                        const OptionalTensor& positions, const RowsAndHeads& n, CombineParams* params) {
  if (attn_sink) {
    check_cuda_device("attn_sink", *attn_sink, n.device);
    check_shape("attn_sink", *attn_sink, {n.heads});
    check_dtype("attn_sink", *attn_sink, {ScalarType::Float});
    check_stride("attn_sink", *attn_sink, 0, 1);
    params->attn_sink = static_cast<const float*>(attn_sink->data_ptr());
  }
  fill_rope(freqs_cis, positions, n.tokens, n.device, params);
}

void fill_scales(const OptionalTensor& scales, const RowsAndHeads& n, CombineParams* params) {
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
                  const OptionalTensor& amax, const RowsAndHeads& n, CombineParams* params) {
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

void check_rope(const OptionalTensor& freqs_cis, const OptionalTensor& positions, int64_t tokens, int32_t device) {
  check(freqs_cis.has_value() == positions.has_value(), "freqs_cis and positions: expected both or neither, got only ",
        freqs_cis ? "freqs_cis" : "positions");
  if (!freqs_cis) return;
  check_cuda_device("freqs_cis", *freqs_cis, device);
  check_shape("freqs_cis", *freqs_cis, {kAny, kRopeDim});
  check_dtype("freqs_cis", *freqs_cis, {ScalarType::Float});
  check_stride("freqs_cis", *freqs_cis, 1, 1);
  check_vector_access("freqs_cis", *freqs_cis, 2);
  check_cuda_device("positions", *positions, device);
  check_shape("positions", *positions, {tokens});
  check_dtype("positions", *positions, {ScalarType::Int, ScalarType::Long});
}

void fill_epilogue(const OptionalTensor& attn_sink, const OptionalTensor& freqs_cis, const OptionalTensor& positions,
                   int64_t output, const Tensor& out, const Tensor& lse, const OptionalTensor& scales,
                   const OptionalTensor& amax, const RowsAndHeads& n, CombineParams* params) {
  fill_sink_and_rope(attn_sink, freqs_cis, positions, n, params);
  fill_outputs(output, out, lse, scales, amax, n, params);
}

}  // namespace sgl_dsv4::api
