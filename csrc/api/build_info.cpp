#include "api/build_info.h"

#include <torch/headeronly/version.h>

#include "api/tensor_checks.h"
#include "common/cache_layout.h"

#define SGL_DSV4_STRING_(x) #x
#define SGL_DSV4_STRING(x) SGL_DSV4_STRING_(x)

namespace sgl_dsv4::api {

int64_t cache_layout_fact(int64_t layout, std::string fact, int64_t page_size) {
  check(layout == 0 || layout == 1, "layout: expected 0 (v4) or 1 (bf16), got ", layout);
  const CacheLayout l = static_cast<CacheLayout>(layout);
  if (fact == "data_bytes") return data_bytes(l);
  if (fact == "scale_bytes") return scale_bytes(l);
  if (fact == "page_align") return page_align(l);
  if (fact == "scale_offset") return scale_offset(l, page_size);
  if (fact == "page_bytes") return page_bytes(l, page_size);
  fail("fact: expected data_bytes, scale_bytes, page_align, scale_offset or page_bytes, got ", fact);
}

std::string build_info() {
  std::string info = "torch=" SGL_DSV4_STRING(TORCH_VERSION_MAJOR) "." SGL_DSV4_STRING(TORCH_VERSION_MINOR) "\n";
#ifdef SGL_DSV4_CUDA
  info += "cuda=" SGL_DSV4_CUDA "\narchitectures=" SGL_DSV4_ARCHS "\n";
#else
  info += "cuda=none\narchitectures=\n";
#endif
  return info;
}

}  // namespace sgl_dsv4::api
