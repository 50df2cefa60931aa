// What this binary is: read by Python, by the doctor and by the tests that compare the two layouts.
#pragma once

#include <cstdint>
#include <string>

namespace sgl_dsv4::api {

// One number of cache_layout.h: `fact` is data_bytes, scale_bytes, page_align, scale_offset or page_bytes.
int64_t cache_layout_fact(int64_t layout, std::string fact, int64_t page_size);

// "key=value" lines: cuda (version or none), architectures (as the build was asked for), torch (headers built against).
std::string build_info();

}  // namespace sgl_dsv4::api
