// One block of FP4: the arithmetic of trace_rl.formats.{e2m1,nvfp4,mxfp4} and trace_rl.guidance.align, 16 lanes at a time.
//
// Written with the compiler's vector types (GCC, Clang), which any instruction set lowers; lanes are the values of a
// block, or 16 blocks when scales are computed. Every operation is IEEE float32 in the order of the Python definition,
// so this must be compiled without -ffast-math and with -ffp-contract=off: a fused x*r + c would round once, not twice.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace fp4 {

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));
typedef uint8_t B __attribute__((vector_size(16)));

constexpr int kLanes = 16;
constexpr int32_t kMagnitude = 0x7FFFFFFF, kExponent = 0x7F800000, kOne = 0x3F800000, kSix = 0x40C00000;
constexpr int32_t kNan = 0x7FC00000;
constexpr float kStepToMagic = 6291456.0f;  // 1.5 * 2^22: times p, a float whose unit in the last place is p/2
constexpr U kLane8 = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr I kUpperHalf = {0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1};

inline F broadcast(float value) { return F{} + value; }
inline I smaller(I a, I b) { return a < b ? a : b; }
inline I larger(I a, I b) { return a > b ? a : b; }

inline F load(const float* x) {
  F value;
  std::memcpy(&value, x, sizeof value);
  return value;
}
// GCC 12 converts between 16 and 32 bits in two halves; AVX-512 does it in one instruction.
inline U widened(H half) {
#if defined(__AVX512F__)
  return (U)_mm512_cvtepu16_epi32((__m256i)half);
#else
  return __builtin_convertvector(half, U);
#endif
}
inline H narrowed(U value) {
#if defined(__AVX512F__)
  return (H)_mm512_cvtepi32_epi16((__m512i)value);
#else
  return __builtin_convertvector(value, H);
#endif
}

inline F load(const uint16_t* x) {  // bfloat16
  H half;
  std::memcpy(&half, x, sizeof half);
  return (F)(widened(half) << 16);
}
inline U to_bf16_bits(F value) {  // in the upper half of each lane, to nearest, ties to even; the values are finite
  const U bits = (U)value;
  return bits + (0x7FFF + ((bits >> 16) & 1));
}
inline F rounded(F value) { return (F)(to_bf16_bits(value) & 0xFFFF0000u); }
inline void store(float* out, F value) { std::memcpy(out, &value, sizeof value); }
inline void store(uint16_t* out, F value) {  // bfloat16
  const H half = narrowed(to_bf16_bits(value) >> 16);
  std::memcpy(out, &half, sizeof half);
}

// In two steps: GCC narrows 32 to 8 bits lane by lane, but has instructions for each half of the way.
inline B bytes_of(I value) { return __builtin_convertvector(narrowed((U)value), B); }
inline I lanes_of(B bytes) { return (I)widened(__builtin_convertvector(bytes, H)); }

// Maxima of pairs of lanes: of a in the first eight lanes, of b in the others.
inline I pair_max(I a, I b) {
#if defined(__clang__)
  return larger(__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
#else
  constexpr I even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  return larger(__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, even + 1));
#endif
}

// Largest magnitudes of 16 blocks as float bits, which order like the magnitudes, NaN and Inf above the finite ones.
template <int kBlock, class T>
inline I amax_of(const T* x, int64_t count) {
  I blocks[kLanes] = {};
  for (int64_t b = 0; b < count; ++b) {
    I most = (I)load(x + b * kBlock) & kMagnitude;
    for (int part = kLanes; part < kBlock; part += kLanes)
      most = larger(most, (I)load(x + b * kBlock + part) & kMagnitude);
    blocks[b] = most;
  }
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) blocks[i] = pair_max(blocks[2 * i], blocks[2 * i + 1]);
  return blocks[0];
}

// E4M3 codes of floats in [0, 448], to nearest, ties to even, subnormal codes included.
inline I e4m3_code(F value) {
  const I bits = (I)value;
  const I normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3);
  const I subnormal = (I)(value + 16384.0f) - 0x46800000;  // 2^14: its unit in the last place is 2^-9
  return value < 0.015625f ? subnormal : normal;
}
inline F e4m3_value(I byte) {  // of any byte: a foreign or unwritten one may be negative, or NaN (127)
  const I code = byte & 127;
  const F normal = (F)((code + (120 << 3)) << 20);
  const F subnormal = __builtin_convertvector(code, F) * 0.001953125f;
  const I magnitude = (I)(code < 8 ? subnormal : normal);
  return (F)((code == 127 ? I{} + kNan : magnitude) | (byte & 128) << 24);
}

inline F reciprocal(F step) { return step == 0.0f ? F{} : 1.0f / step; }

struct Nvfp4 {
  static constexpr int kBlock = 16;
  float scale, inverse;  // G and 1/G

  explicit Nvfp4(float encode_scale) : scale(encode_scale), inverse(1.0f / encode_scale) {}

  I scale_bytes(I amax) const {
    const F ideal = (F)amax * (1.0f / 6.0f) * scale;
    return e4m3_code(ideal < 448.0f ? ideal : broadcast(448.0f));
  }
  F steps(I bytes) const { return e4m3_value(bytes) * inverse; }
};

enum Rule { kCeil, kFloor, kEven };

template <Rule kRule>
struct Mxfp4 {
  static constexpr int kBlock = 32;

  explicit Mxfp4(float) {}

  I scale_bytes(I amax) const {
    I exponent;
    if constexpr (kRule == kCeil) exponent = ((I)((F)amax / 6.0f) + 0x7FFFFF) >> 23;
    if constexpr (kRule == kFloor) exponent = (amax >> 23) - 2;
    if constexpr (kRule == kEven) exponent = ((amax + (1 << 21)) >> 23) - 2;
    return smaller(larger(exponent, I{}), I{} + 254);
  }
  F steps(I bytes) const { return (F)larger(bytes << 23, I{} + 0x00400000); }  // 2^(byte - 127); byte 0: a subnormal
};

// z = y clamped to [-6, 6]; its octave p; z + c, whose lowest bits count steps of p/2; the rounded value.
struct Rounded {
  F z, octave, magic, shifted, q;
};

inline Rounded round_e2m1(F y) {
  const I magnitude = smaller((I)y & kMagnitude, I{} + kSix);
  const F z = (F)(magnitude | ((I)y & ~kMagnitude));
  const F octave = (F)larger(magnitude & kExponent, I{} + kOne);
  const F magic = octave * kStepToMagic;
  const F shifted = z + magic;
  return {z, octave, magic, shifted, shifted - magic};
}

// sign<<3 | index. k counts steps from zero; every octave above the first adds two indices.
inline I code_of(const Rounded& value) {
  const I k = (I)value.shifted - (I)value.magic;
  const I sign = k >> 31;
  return (((k ^ sign) - sign) + (((I)value.octave - kOne) >> 22)) | (sign & 8);
}

inline F magnitude_of(I index) {
#if !defined(__clang__)
  // One permutation of a register that holds the table; only indices 0 to 7 are asked for.
  constexpr F table = {0, .5f, 1, 1.5f, 2, 3, 4, 6, 0, .5f, 1, 1.5f, 2, 3, 4, 6};
  return __builtin_shuffle(table, index);
#endif
  const F normal = (F)((((index >> 1) + 126) << 23) | ((index & 1) << 22));
  return index < 2 ? __builtin_convertvector(index, F) * 0.5f : normal;
}

// The value on the rollout's side: one bit selects by parity, more bits by where q_roll lies (trace_rl.guidance.align).
template <int kBits, bool kGated>
inline F follow(const Rounded& value, I guide, float reach) {
  const F remainder = value.z - value.q;
  I move;
  if constexpr (kBits == 1) {
    move = -(((I)value.shifted ^ guide) & 1) & (remainder != 0.0f);
  } else {
    const I low = guide & ((1 << (kBits < 4 ? kBits : 3)) - 1);
    F rollout = magnitude_of(low);
    if constexpr (kBits == 2)
      rollout = (F)((I)value.z & kMagnitude) > magnitude_of(low + 2) ? magnitude_of(low + 4) : rollout;
    const I sign = kBits == 4 ? (guide & 8) << 28 : (I)value.z & ~kMagnitude;
    rollout = (F)((I)rollout | sign);
    const F ahead = rollout - value.z;
    move = (ahead != 0.0f) & (remainder != 0.0f) & ~(((I)ahead ^ (I)remainder) >> 31);
  }
  if constexpr (kGated) move &= (F)((I)remainder & kMagnitude) >= value.octave * reach;
  // Half an octave towards the remainder's side, where `move`.
  const I half = ((I)(value.octave * 0.5f) | ((I)remainder & ~kMagnitude)) & move;
  return value.q + (F)half;
}

// 16 codes below 2^kBits -> 2*kBits bytes, code j of each eight in bits j*kBits.. (trace_rl.guidance.bits).
template <int kBits>
inline uint64_t fold(uint64_t word) {
  if constexpr (kBits == 1)  // the products 8j + 56 - 7i never collide, so the top byte collects the lowest bits
    return ((word & 0x0101010101010101ULL) * 0x0102040810204080ULL) >> 56;
  constexpr uint64_t mask = (1ULL << kBits) - 1;
  word &= mask * 0x0101010101010101ULL;
  word = (word | word >> (8 - kBits)) & ((1ULL << 2 * kBits) - 1) * 0x0001000100010001ULL;
  word = (word | word >> 2 * (8 - kBits)) & ((1ULL << 4 * kBits) - 1) * 0x0000000100000001ULL;
  return (word | word >> 4 * (8 - kBits)) & ((1ULL << 8 * kBits) - 1);
}
template <int kBits>
inline void pack(I codes, uint8_t* out) {
  const B narrow = bytes_of(codes);
  uint64_t words[2];
  std::memcpy(words, &narrow, 16);
  const uint64_t low = fold<kBits>(words[0]), high = fold<kBits>(words[1]);
  std::memcpy(out, &low, kBits);
  std::memcpy(out + kBits, &high, kBits);
}
template <int kBits>
inline I unpack(const uint8_t* packed) {
  uint32_t low = 0, high = 0;
  std::memcpy(&low, packed, kBits);
  std::memcpy(&high, packed + kBits, kBits);
  const U words = ((U{} + low) & ~(U)kUpperHalf) | ((U{} + high) & (U)kUpperHalf);
  return (I)((words >> (kLane8 * kBits)) & ((1 << kBits) - 1));
}

}  // namespace fp4
