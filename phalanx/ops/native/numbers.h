// bfloat16 to float32 and back, and e^x, in forms that compilers turn into vector instructions.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

using bf16 = std::uint16_t;
inline float bits_to_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float widen(bf16 x) { return bits_to_float(static_cast<std::uint32_t>(x) << 16); }

// To nearest, ties to even.
inline bf16 narrow(float x) {
  const std::uint32_t bits = float_to_bits(x);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<bf16>(x != x ? 0x7fc0u : rounded);
}

// e^x within 2 units of the last place; below -87 it is the smallest normal number's neighbourhood.
inline float exp_of(float x) {
  x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
  const float n = std::nearbyintf(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // Cody and Waite's split of ln 2
  float p = 1.9875691500e-4f;                                   // minimax polynomial of Cephes expf
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float safe = n == n ? n : 0.0f;
  return p * bits_to_float(static_cast<std::uint32_t>((static_cast<std::int32_t>(safe) + 127) << 23));
}

}  // namespace
