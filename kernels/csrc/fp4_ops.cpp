// The quantizer as one pass over memory, for CPUs: backend `compiled` of trace_rl.kernels.
//
// The Python side (trace_rl/kernels/compiled.py) checks shapes and types and makes rows dense; here are loops over rows
// and strips of blocks. Each function returns whether it met NaN or Inf, which only the caller can name.
#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "fp4_block.h"

namespace {

using at::Tensor;
using fp4::kLanes;

constexpr int64_t kGrain = 16384;  // values per task: less is not worth a thread

// Encode scales of the rows: one for all of them, or row / group.
struct Scales {
  const float* values;
  int64_t group;  // rows that share one scale; 0: all

  float of_row(int64_t row) const { return values[group == 0 ? 0 : row / group]; }
};

// What to write of every row; null pointers are left out.
template <class T>
struct Outputs {
  T* xhat = nullptr;
  uint8_t* codes = nullptr;        // [rows, cols/2]
  uint8_t* block_scale = nullptr;  // [rows, cols/block]
  uint8_t* record = nullptr;       // byte `start` of the buffer's row 0
  const int64_t* slots = nullptr;
  int64_t row_bytes = 0;
};

inline void write_scales(const uint8_t* bytes, int64_t num_blocks, int64_t scale_bits, uint8_t* out) {
  if (scale_bits == 8) {
    std::memcpy(out, bytes, num_blocks);
    return;
  }
  for (int64_t i = 0; i < num_blocks; i += 4) {
    uint8_t packed = 0;
    for (int64_t j = i; j < std::min(i + 4, num_blocks); ++j) packed |= (bytes[j] & 3) << (2 * (j - i));
    out[i / 4] = packed;
  }
}

// One row's scale bytes, the steps they stand for and their reciprocals, in whole strips of blocks.
struct RowScales {
  std::vector<uint8_t> bytes;
  std::vector<float> steps, reciprocals;

  explicit RowScales(int64_t num_blocks)
      : bytes(num_blocks + kLanes), steps(num_blocks + kLanes), reciprocals(num_blocks + kLanes) {}

  void set_steps(int64_t first, fp4::F values) {
    fp4::store(steps.data() + first, values);
    fp4::store(reciprocals.data() + first, fp4::reciprocal(values));
  }
};

// The scales that rounding to nearest uses; the largest magnitude's bits are kept in `most`.
template <class Fmt, class T>
inline void own_scales(const Fmt& fmt, const T* x, int64_t num_blocks, RowScales& scales, fp4::I* most) {
  for (int64_t first = 0; first < num_blocks; first += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, num_blocks - first);
    const fp4::I amax = fp4::amax_of<Fmt::kBlock>(x + first * Fmt::kBlock, count);
    *most = fp4::larger(*most, amax);
    const fp4::I codes = fmt.scale_bytes(amax);
    const fp4::B narrow = fp4::bytes_of(codes);
    std::memcpy(scales.bytes.data() + first, &narrow, sizeof narrow);
    scales.set_steps(first, fmt.steps(codes));
  }
}

inline bool finite(const fp4::I& most) {
  for (int lane = 0; lane < kLanes; ++lane)
    if (most[lane] >= fp4::kExponent) return false;
  return true;
}

// Quantize rows [begin, end); kBits: of the record (0: none). Returns whether all values were finite.
template <class Fmt, class T, int kBits>
bool nearest_rows(const T* x, int64_t stride, int64_t cols, Scales scales, const Outputs<T>& out, int64_t scale_bits,
                  int64_t begin, int64_t end) {
  const int64_t num_blocks = cols / Fmt::kBlock;
  RowScales own(num_blocks);
  fp4::I most{};
  for (int64_t row = begin; row < end; ++row) {
    const Fmt fmt(scales.of_row(row));
    const T* x_row = x + row * stride;
    T* xhat = out.xhat ? out.xhat + row * cols : nullptr;
    uint8_t* codes = out.codes ? out.codes + row * cols / 2 : nullptr;
    uint8_t* record = kBits > 0 ? out.record + out.slots[row] * out.row_bytes : nullptr;
    own_scales(fmt, x_row, num_blocks, own, &most);
    for (int64_t block = 0; block < num_blocks; ++block) {
      const float step = own.steps[block], r = own.reciprocals[block];
      for (int64_t at = block * Fmt::kBlock; at < (block + 1) * Fmt::kBlock; at += kLanes) {
        const fp4::Rounded value = fp4::round_e2m1(fp4::load(x_row + at) * r);
        if (xhat) fp4::store(xhat + at, value.q * step);
        if (kBits > 0 || codes) {
          const fp4::I code = fp4::code_of(value);
          if (codes) fp4::pack<4>(code, codes + at / 2);
          if constexpr (kBits > 0) fp4::pack<kBits>(code, record + at * kBits / 8);
        }
      }
    }
    if (out.block_scale) std::memcpy(out.block_scale + row * num_blocks, own.bytes.data(), num_blocks);
    if (kBits > 0) write_scales(own.bytes.data(), num_blocks, scale_bits, record + cols * kBits / 8);
  }
  return finite(most);
}

struct Guide {
  const uint8_t* planes;
  const uint8_t* scales;
  int64_t planes_stride, scales_stride;
  const bool* valid;  // null: all
  float reach;        // octaves; negative: ungated
};

template <class Fmt, class T, int kBits, bool kGated>
bool guided_rows(const T* x, int64_t stride, int64_t cols, Scales scales, const Guide& guide, T* xhat, int64_t begin,
                 int64_t end) {
  const int64_t num_blocks = cols / Fmt::kBlock;
  RowScales recorded(num_blocks);
  fp4::I most{};
  for (int64_t row = begin; row < end; ++row) {
    if (guide.valid && !guide.valid[row]) {
      Outputs<T> out;
      out.xhat = xhat;
      if (!nearest_rows<Fmt, T, 0>(x, stride, cols, scales, out, 8, row, row + 1)) most += fp4::kExponent;
      continue;
    }
    const Fmt fmt(scales.of_row(row));
    const T* x_row = x + row * stride;
    T* xhat_row = xhat + row * cols;
    const uint8_t* planes = guide.planes + row * guide.planes_stride;
    const uint8_t* bytes = guide.scales + row * guide.scales_stride;
    for (int64_t first = 0; first < num_blocks; first += kLanes) {
      fp4::B narrow{};
      std::memcpy(&narrow, bytes + first, std::min<int64_t>(kLanes, num_blocks - first));
      recorded.set_steps(first, fmt.steps(fp4::lanes_of(narrow)));
    }
    for (int64_t block = 0; block < num_blocks; ++block) {
      const float step = recorded.steps[block], r = recorded.reciprocals[block];
      for (int64_t at = block * Fmt::kBlock; at < (block + 1) * Fmt::kBlock; at += kLanes) {
        const fp4::F values = fp4::load(x_row + at);
        most = fp4::larger(most, (fp4::I)values & fp4::kMagnitude);
        const fp4::I codes = fp4::unpack<kBits>(planes + at * kBits / 8);
        fp4::store(xhat_row + at, fp4::follow<kBits, kGated>(fp4::round_e2m1(values * r), codes, guide.reach) * step);
      }
    }
  }
  return finite(most);
}

// Calls body(begin, end) in parallel over rows; true if every call returned true.
template <class Body>
bool over_rows(int64_t rows, int64_t cols, const Body& body) {
  std::atomic<bool> finite{true};
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cols)), [&](int64_t begin, int64_t end) {
    if (!body(begin, end)) finite = false;
  });
  return finite;
}

// Calls f(format tag, element pointer tag) for the format number: 0 nvfp4, 1.. mxfp4 by rule.
template <class F>
bool with_format(int64_t format, const F& f) {
  switch (format) {
    case 0: return f.template operator()<fp4::Nvfp4>();
    case 1: return f.template operator()<fp4::Mxfp4<fp4::kCeil>>();
    case 2: return f.template operator()<fp4::Mxfp4<fp4::kFloor>>();
    case 3: return f.template operator()<fp4::Mxfp4<fp4::kEven>>();
  }
  TORCH_CHECK(false, "unknown format number ", format);
}

template <class F>
bool with_bits(int64_t bits, const F& f) {
  switch (bits) {
    case 0: return f.template operator()<0>();
    case 1: return f.template operator()<1>();
    case 2: return f.template operator()<2>();
    case 3: return f.template operator()<3>();
    case 4: return f.template operator()<4>();
  }
  TORCH_CHECK(false, "bits must be 0 to 4");
}

uint8_t* bytes(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<uint8_t*>(tensor->data_ptr()) : nullptr;
}

template <class T>
bool nearest_typed(const Tensor& x, Scales scales, int64_t format, const Outputs<T>& out, int64_t bits,
                   int64_t scale_bits) {
  const int64_t rows = x.size(0), cols = x.size(1), stride = x.stride(0);
  const T* values = static_cast<const T*>(x.const_data_ptr());
  return with_format(format, [&]<class Fmt>() {
    return with_bits(bits, [&]<int kBits>() {
      return over_rows(rows, cols, [&](int64_t begin, int64_t end) {
        return nearest_rows<Fmt, T, kBits>(values, stride, cols, scales, out, scale_bits, begin, end);
      });
    });
  });
}

// x [rows, cols] with dense rows; encode_scale float32 [n], each for `group` rows (0: one for all).
bool nearest(const Tensor& x, const Tensor& encode_scale, int64_t group, int64_t format,
             const std::optional<Tensor>& xhat, const std::optional<Tensor>& codes,
             const std::optional<Tensor>& block_scale, const std::optional<Tensor>& buffer,
             const std::optional<Tensor>& slots, int64_t start, int64_t bits, int64_t scale_bits) {
  const Scales scales{encode_scale.const_data_ptr<float>(), group};
  const auto fill = [&]<class T>(T*) {
    Outputs<T> out;
    out.xhat = xhat ? static_cast<T*>(xhat->data_ptr()) : nullptr;
    out.codes = bytes(codes);
    out.block_scale = bytes(block_scale);
    if (buffer) {
      for (int64_t row = 0; row < x.size(0); ++row) {
        const int64_t slot = slots->const_data_ptr<int64_t>()[row];
        TORCH_CHECK(slot >= 0 && slot < buffer->size(0), "slot ", slot, " of ", buffer->size(0));
      }
      out.record = bytes(buffer) + start;
      out.slots = slots->const_data_ptr<int64_t>();
      out.row_bytes = buffer->stride(0);
    }
    return nearest_typed<T>(x, scales, format, out, buffer ? bits : 0, scale_bits);
  };
  return x.scalar_type() == at::kFloat ? fill(static_cast<float*>(nullptr)) : fill(static_cast<uint16_t*>(nullptr));
}

bool guided(const Tensor& x, const Tensor& planes, const Tensor& block_scale, const Tensor& encode_scale, int64_t group,
            int64_t format, int64_t bits, double reach, const std::optional<Tensor>& valid, const Tensor& xhat) {
  const Scales scales{encode_scale.const_data_ptr<float>(), group};
  const Guide guide{planes.const_data_ptr<uint8_t>(), block_scale.const_data_ptr<uint8_t>(), planes.stride(0),
                    block_scale.stride(0), valid ? valid->const_data_ptr<bool>() : nullptr, static_cast<float>(reach)};
  const int64_t rows = x.size(0), cols = x.size(1), stride = x.stride(0);
  const auto run = [&]<class T>(T* out) {
    const T* values = static_cast<const T*>(x.const_data_ptr());
    return with_format(format, [&]<class Fmt>() {
      return with_bits(bits, [&]<int kBits>() {
        return over_rows(rows, cols, [&](int64_t begin, int64_t end) {
          if constexpr (kBits == 0) {
            return true;
          } else {
            return reach < 0
                       ? guided_rows<Fmt, T, kBits, false>(values, stride, cols, scales, guide, out, begin, end)
                       : guided_rows<Fmt, T, kBits, true>(values, stride, cols, scales, guide, out, begin, end);
          }
        });
      });
    });
  };
  return x.scalar_type() == at::kFloat ? run(static_cast<float*>(xhat.data_ptr()))
                                       : run(static_cast<uint16_t*>(xhat.data_ptr()));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("nearest", &nearest, pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("guided", &guided, pybind11::call_guard<pybind11::gil_scoped_release>());
}
