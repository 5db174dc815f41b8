// Rows of blocks: round to nearest on their own scales, or follow a record; what to write is chosen by the caller.
//
// Included by each operator file; a strip is kLanes blocks, whose scales are computed together.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

#include "fp4_block.h"

namespace fp4 {

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

  void set_steps(int64_t first, F values) {
    store(steps.data() + first, values);
    store(reciprocals.data() + first, reciprocal(values));
  }
};

// The scales that rounding to nearest uses; the largest magnitude's bits are kept in `most`.
template <class Fmt, class T>
inline void own_scales(const Fmt& fmt, const T* x, int64_t num_blocks, RowScales& scales, I* most) {
  for (int64_t first = 0; first < num_blocks; first += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, num_blocks - first);
    const I amax = amax_of<Fmt::kBlock>(x + first * Fmt::kBlock, count);
    *most = larger(*most, amax);
    const I codes = fmt.scale_bytes(amax);
    const B narrow = bytes_of(codes);
    std::memcpy(scales.bytes.data() + first, &narrow, sizeof narrow);
    // A block with a NaN becomes NaN as a whole: rounded to a number, it would hide what went wrong.
    // This NaN, not the step's bits with NaN's set: store() rounds those up past the largest NaN when they end in ones.
    scales.set_steps(first, (F)(amax > kExponent ? I{} + kNan : (I)fmt.steps(codes)));
  }
}

inline bool finite(const I& most) {
  for (int lane = 0; lane < kLanes; ++lane)
    if (most[lane] >= kExponent) return false;
  return true;
}

// Quantize rows [begin, end); kBits: of the record (0: none). Returns whether all values were finite.
template <class Fmt, class T, int kBits>
bool nearest_rows(const T* x, int64_t stride, int64_t cols, Scales scales, const Outputs<T>& out, int64_t scale_bits,
                  int64_t begin, int64_t end) {
  const int64_t num_blocks = cols / Fmt::kBlock;
  RowScales own(num_blocks);
  I most{};
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
        const Rounded value = round_e2m1(load(x_row + at) * r);
        if (xhat) store(xhat + at, value.q * step);
        if (kBits > 0 || codes) {
          const I code = code_of(value);
          if (codes) pack<4>(code, codes + at / 2);
          if constexpr (kBits > 0) pack<kBits>(code, record + at * kBits / 8);
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
  I most{};
  for (int64_t row = begin; row < end; ++row) {
    if (guide.valid && !guide.valid[row]) {
      Outputs<T> out;
      out.xhat = xhat;
      if (!nearest_rows<Fmt, T, 0>(x, stride, cols, scales, out, 8, row, row + 1)) most = larger(most, I{} + kExponent);
      continue;
    }
    const Fmt fmt(scales.of_row(row));
    const T* x_row = x + row * stride;
    T* xhat_row = xhat + row * cols;
    const uint8_t* planes = guide.planes + row * guide.planes_stride;
    const uint8_t* bytes = guide.scales + row * guide.scales_stride;
    for (int64_t first = 0; first < num_blocks; first += kLanes) {
      B narrow{};
      std::memcpy(&narrow, bytes + first, std::min<int64_t>(kLanes, num_blocks - first));
      recorded.set_steps(first, fmt.steps(lanes_of(narrow)));
    }
    for (int64_t block = 0; block < num_blocks; ++block) {
      const float step = recorded.steps[block], r = recorded.reciprocals[block];
      for (int64_t at = block * Fmt::kBlock; at < (block + 1) * Fmt::kBlock; at += kLanes) {
        const F values = load(x_row + at);
        most = larger(most, (I)values & kMagnitude);
        const I codes = unpack<kBits>(planes + at * kBits / 8);
        store(xhat_row + at, follow<kBits, kGated>(round_e2m1(values * r), codes, guide.reach) * step);
      }
    }
  }
  return finite(most);
}

// f.operator()<Format>() for the format's number: 0 nvfp4, 1.. mxfp4 by rule.
template <class F>
auto with_format(int64_t format, const F& f) {
  switch (format) {
    case 0: return f.template operator()<Nvfp4>();
    case 1: return f.template operator()<Mxfp4<kCeil>>();
    case 2: return f.template operator()<Mxfp4<kFloor>>();
    case 3: return f.template operator()<Mxfp4<kEven>>();
  }
  TORCH_CHECK(false, "unknown format number ", format);
}

}  // namespace fp4
