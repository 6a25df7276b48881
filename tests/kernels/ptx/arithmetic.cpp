#include "tests/kernels/ptx/arithmetic.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ptx {
namespace {

// --- running a function of one lane's values -----------------------------------------------------

// Arithmetic that gives NaN gives that of GPUs, or any quiet one.
template <typename T>
void replace_nans(const Context& c, uint32_t* d) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  constexpr Bits kGpuNan = sizeof(T) == 8 ? Bits(0x7ff8000000000000u) : Bits(0x7fffffffu);
  const Bits quiet = std::bit_cast<Bits>(std::numeric_limits<T>::quiet_NaN());
  bool any = false;
  for (uint32_t i = 0; i < kWarpLanes; ++i) {
    const T x = get<T>(d, i);
    any |= x != x;
  }
  if (!any) return;
  for_lanes(c.mask, [&](uint32_t i) {
    const T x = get<T>(d, i);
    if (x == x) return;
    put<Bits>(d, i, options().random ? static_cast<Bits>(draw()) | quiet : kGpuNan);
  });
}

template <typename F, typename D, typename... S, size_t... kIndex>
void run_lanes(Context& c, const Op& op, std::index_sequence<kIndex...> /*sources*/) {
  uint32_t* d = words_of(c, op.d);
  const std::array<const uint32_t*, sizeof...(S)> s{words_of(c, op.s[kIndex])...};
  for_lanes(c.mask, [&](uint32_t i) { put<D>(d, i, F{}(get<S>(s[kIndex], i)...)); });
  if constexpr (std::is_floating_point_v<D>) replace_nans<D>(c, d);
}

template <typename T>
constexpr uint8_t bits_of_type() {
  return std::is_same_v<T, Pred> ? 1 : uint8_t(8 * sizeof(T));
}

template <typename F, typename D, typename... S>
Instruction make(D (* /*signature*/)(S...)) {
  return {[](Context& c, const Op& op) {
            run_lanes<F, D, S...>(c, op, std::index_sequence_for<S...>());
          },
          bits_of_type<D>(),
          sizeof...(S),
          {bits_of_type<S>()...}};
}
// Of a function object without state.
template <typename F>
Instruction lanes(F f) {
  return make<F>(+f);
}

// --- the table -----------------------------------------------------------------------------------

using Table = std::map<std::string, Instruction, std::less<>>;

Pred pred(bool value) { return {value ? kAllLanes : 0u}; }

template <typename T>
void add_integer(Table& t, const std::string& type) {
  using U = std::make_unsigned_t<T>;
  t["add." + type] = lanes([](T a, T b) -> T { return T(U(a) + U(b)); });
  t["sub." + type] = lanes([](T a, T b) -> T { return T(U(a) - U(b)); });
  t["neg." + type] = lanes([](T a) -> T { return T(0 - U(a)); });
  t["mul.lo." + type] = lanes([](T a, T b) -> T { return T(uint64_t(a) * uint64_t(b)); });
  t["mad.lo." + type] =
      lanes([](T a, T b, T c) -> T { return T(uint64_t(a) * uint64_t(b) + uint64_t(c)); });
  t["min." + type] = lanes([](T a, T b) -> T { return a < b ? a : b; });
  t["max." + type] = lanes([](T a, T b) -> T { return a < b ? b : a; });
  t["shr." + type] = lanes([](T a, uint32_t n) -> T {
    constexpr uint32_t kMost = 8 * sizeof(T) - 1;
    return n <= kMost ? T(a >> n) : std::is_signed_v<T> ? T(a >> kMost) : T(0);
  });
  t["setp.lt." + type] = lanes([](T a, T b) { return pred(a < b); });
  t["setp.le." + type] = lanes([](T a, T b) { return pred(a <= b); });
  t["setp.gt." + type] = lanes([](T a, T b) { return pred(a > b); });
  t["setp.ge." + type] = lanes([](T a, T b) { return pred(a >= b); });
}

// Types whose bits alone count.
template <typename T>
void add_bits(Table& t, const std::string& type) {
  t["mov." + type] = lanes([](T a) -> T { return a; });
  t["setp.eq." + type] = lanes([](T a, T b) { return pred(a == b); });
  t["setp.ne." + type] = lanes([](T a, T b) { return pred(a != b); });
  t["selp." + type] = lanes([](T a, T b, Pred p) -> T { return p.bits != 0 ? a : b; });
  t["and." + type] = lanes([](T a, T b) -> T { return T(a & b); });
  t["or." + type] = lanes([](T a, T b) -> T { return T(a | b); });
  t["xor." + type] = lanes([](T a, T b) -> T { return T(a ^ b); });
  t["not." + type] = lanes([](T a) -> T { return T(~a); });
  t["shl." + type] =
      lanes([](T a, uint32_t n) -> T { return n < 8 * sizeof(T) ? T(uint64_t(a) << n) : T(0); });
}

template <typename T>
void add_float(Table& t, const std::string& type) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  add_bits<Bits>(t, type);  // setp.eq and setp.ne are replaced
  t["add.rn." + type] = lanes([](T a, T b) -> T { return a + b; });
  t["sub.rn." + type] = lanes([](T a, T b) -> T { return a - b; });
  t["mul.rn." + type] = lanes([](T a, T b) -> T { return a * b; });
  t["div.rn." + type] = lanes([](T a, T b) -> T { return a / b; });
  t["rcp.rn." + type] = lanes([](T a) -> T { return T(1) / a; });
  t["sqrt.rn." + type] = lanes([](T a) -> T { return std::sqrt(a); });
  t["abs." + type] = lanes([](T a) -> T { return std::fabs(a); });
  t["neg." + type] = lanes([](T a) -> T { return -a; });
  // The sign of a, the magnitude of b, as bits: a NaN keeps its own.
  t["copysign." + type] = lanes([](Bits a, Bits b) -> Bits {
    constexpr Bits kSign = Bits(1) << (8 * sizeof(Bits) - 1);
    return (a & kSign) | (b & ~kSign);
  });
  // -0 is below 0; of a NaN and a number, the number.
  t["min." + type] = lanes([](T a, T b) -> T {
    if (a == b) return std::signbit(a) ? a : b;
    return a < b || b != b ? a : b;
  });
  t["max." + type] = lanes([](T a, T b) -> T {
    if (a == b) return std::signbit(a) ? b : a;
    return a > b || b != b ? a : b;
  });
  t["setp.eq." + type] = lanes([](T a, T b) { return pred(a == b); });
  t["setp.ne." + type] = lanes([](T a, T b) { return pred(a < b || a > b); });
  t["setp.lt." + type] = lanes([](T a, T b) { return pred(a < b); });
  t["setp.le." + type] = lanes([](T a, T b) { return pred(a <= b); });
  t["setp.gt." + type] = lanes([](T a, T b) { return pred(a > b); });
  t["setp.ge." + type] = lanes([](T a, T b) { return pred(a >= b); });
  t["setp.num." + type] = lanes([](T a, T b) { return pred(a == a && b == b); });
  t["setp.nan." + type] = lanes([](T a, T b) { return pred(a != a || b != b); });
  // True of NaNs.
  t["setp.equ." + type] = lanes([](T a, T b) { return pred(!(a < b || a > b)); });
  t["setp.neu." + type] = lanes([](T a, T b) { return pred(a != b); });
  t["setp.ltu." + type] = lanes([](T a, T b) { return pred(!(a >= b)); });
  t["setp.leu." + type] = lanes([](T a, T b) { return pred(!(a > b)); });
  t["setp.gtu." + type] = lanes([](T a, T b) { return pred(!(a <= b)); });
  t["setp.geu." + type] = lanes([](T a, T b) { return pred(!(a < b)); });
}

// Faults where fusing would make a difference.
void fuse_exact(Context& c, const Op& op) {
  const std::array<const uint32_t*, 3> s{words_of(c, op.s[0]), words_of(c, op.s[1]),
                                         words_of(c, op.s[2])};
  uint32_t* d = words_of(c, op.d);
  for_lanes(c.mask, [&](uint32_t i) {
    const float a = get<float>(s[0], i), b = get<float>(s[1], i), product = a * b;
    const double exact = double{a} * double{b};
    if (product != exact && !std::isnan(exact)) fault(c, op, "a fused product that rounds");
    put<float>(d, i, product + get<float>(s[2], i));
  });
  replace_nans<float>(c, d);
}

// Rounds to a half-precision format, to nearest even.
template <int kExponentBits, int kMantissaBits>
uint32_t to_half(float x) {
  if (x != x) return 0x7fff;  // of GPUs, in both formats
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr uint32_t kInfinity = ((1u << kExponentBits) - 1) << kMantissaBits;
  const uint32_t sign = std::signbit(x) ? 0x8000u : 0u;
  const double magnitude = std::fabs(double{x});
  if (std::isinf(magnitude)) return sign | kInfinity;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), 1 - kBias);
  // From 0 to 2^(kMantissaBits + 1); a carry goes into the exponent.
  const double places = std::nearbyint(std::ldexp(magnitude, kMantissaBits - exponent));
  const uint32_t code = static_cast<uint32_t>(places) +
                        (static_cast<uint32_t>(exponent + kBias - 1) << kMantissaBits);
  return sign | std::min(code, kInfinity);
}

float from_half(uint32_t half) {
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
  if (exponent == 31 && mantissa != 0) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 31 ? std::numeric_limits<float>::infinity()
                          : exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -24)
                              : std::ldexp(static_cast<float>(mantissa | 1024), int(exponent) - 25);
  return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

// Narrow sources are in wider registers, whose lower bits count.
void add_conversions(Table& t) {
  t["cvt.u16.u32"] = lanes([](uint32_t a) -> uint16_t { return uint16_t(a); });
  t["cvt.u32.u16"] = lanes([](uint16_t a) -> uint32_t { return a; });
  t["cvt.u64.u16"] = lanes([](uint16_t a) -> uint64_t { return a; });
  t["cvt.u32.u64"] = lanes([](uint64_t a) -> uint32_t { return uint32_t(a); });
  t["cvt.u64.u32"] = lanes([](uint32_t a) -> uint64_t { return a; });
  t["cvt.s32.s8"] = lanes([](int8_t a) -> int32_t { return a; });
  t["cvt.s32.s16"] = lanes([](int16_t a) -> int32_t { return a; });
  t["cvt.rn.f32.u32"] = lanes([](uint32_t a) -> float { return static_cast<float>(a); });
  t["cvt.rzi.u32.f32"] = lanes([](float a) -> uint32_t {  // saturates; 0 for NaN
    return a >= 0x1p32f ? ~uint32_t{0} : a > 0.0f ? static_cast<uint32_t>(a) : 0;
  });
  t["cvt.rn.f64.u32"] = lanes([](uint32_t a) -> double { return a; });
  t["cvt.f64.f32"] = lanes([](float a) -> double { return a; });
  t["cvt.rn.f32.f64"] = lanes([](double a) -> float { return static_cast<float>(a); });
  t["cvt.f32.f16"] = lanes([](uint16_t a) -> float { return from_half(a); });
  t["cvt.rn.f16x2.f32"] = lanes([](float high, float low) -> uint32_t {
    return to_half<5, 10>(high) << 16 | to_half<5, 10>(low);
  });
  t["cvt.rn.bf16x2.f32"] = lanes([](float high, float low) -> uint32_t {
    return to_half<8, 7>(high) << 16 | to_half<8, 7>(low);
  });
  t["cvta.to.global.u64"] = lanes([](uint64_t a) -> uint64_t { return a; });
}

template <typename T>
T insert_bits(T a, T b, uint32_t position, uint32_t length) {
  constexpr uint32_t kBits = 8 * sizeof(T);
  position &= 255, length &= 255;
  if (length == 0 || position >= kBits) return b;
  const T mask = T((length >= kBits ? ~T(0) : T((T(1) << length) - 1)) << position);
  return T((b & ~mask) | (T(a << position) & mask));
}

void add_bit_operations(Table& t) {
  using U32 = uint32_t;
  t["mul.wide.u16"] = lanes([](uint16_t a, uint16_t b) -> U32 { return U32{a} * b; });
  t["mul.wide.u32"] = lanes([](U32 a, U32 b) -> uint64_t { return uint64_t{a} * b; });
  t["mul.hi.u32"] = lanes([](U32 a, U32 b) -> U32 { return U32(uint64_t{a} * b >> 32); });
  t["popc.b32"] = lanes([](U32 a) -> U32 { return U32(std::popcount(a)); });
  t["brev.b32"] = lanes([](U32 a) -> U32 {
    U32 result = 0;
    for (U32 i = 0; i < 32; ++i) result |= (a >> i & 1) << (31 - i);
    return result;
  });
  t["bfind.shiftamt.u32"] =
      lanes([](U32 a) -> U32 { return a == 0 ? ~0u : U32(std::countl_zero(a)); });
  t["bfe.u32"] = lanes([](U32 a, U32 position, U32 length) -> U32 {  // of these, the lowest bytes
    const uint64_t from = uint64_t{a} >> std::min<U32>(position & 255, 32);
    return U32(from & ((uint64_t{1} << std::min<U32>(length & 255, 32)) - 1));
  });
  t["bfi.b32"] = lanes([](U32 a, U32 b, U32 position, U32 length) -> U32 {
    return insert_bits(a, b, position, length);
  });
  t["bfi.b64"] = lanes([](uint64_t a, uint64_t b, U32 position, U32 length) -> uint64_t {
    return insert_bits(a, b, position, length);
  });
  t["shf.l.wrap.b32"] = lanes(
      [](U32 a, U32 b, U32 n) -> U32 { return U32(((uint64_t{b} << 32 | a) << (n & 31)) >> 32); });
  t["prmt.b32"] = lanes([](U32 a, U32 b, U32 selector) -> U32 {
    const uint64_t bytes = uint64_t{b} << 32 | a;
    U32 result = 0;
    for (U32 i = 0; i < 4; ++i) {
      const U32 nibble = selector >> (4 * i) & 15;
      U32 byte = U32(bytes >> (8 * (nibble & 7))) & 255;
      if ((nibble & 8) != 0) byte = (byte & 128) != 0 ? 255 : 0;  // its sign
      result |= byte << (8 * i);
    }
    return result;
  });
}

void add_predicates(Table& t) {
  t["mov.pred"] = lanes([](Pred a) -> Pred { return a; });
  t["and.pred"] = lanes([](Pred a, Pred b) -> Pred { return {a.bits & b.bits}; });
  t["or.pred"] = lanes([](Pred a, Pred b) -> Pred { return {a.bits | b.bits}; });
  t["xor.pred"] = lanes([](Pred a, Pred b) -> Pred { return {a.bits ^ b.bits}; });
  t["not.pred"] = lanes([](Pred a) -> Pred { return {~a.bits}; });
}

Table make_table() {
  Table t;
  add_integer<int16_t>(t, "s16");
  add_integer<uint16_t>(t, "u16");
  add_integer<int32_t>(t, "s32");
  add_integer<uint32_t>(t, "u32");
  add_integer<int64_t>(t, "s64");
  add_integer<uint64_t>(t, "u64");
  for (const char* kind : {"b", "u", "s"}) {
    add_bits<uint16_t>(t, std::string(kind) + "16");
    add_bits<uint32_t>(t, std::string(kind) + "32");
    add_bits<uint64_t>(t, std::string(kind) + "64");
  }
  add_float<float>(t, "f32");
  add_float<double>(t, "f64");
  t["fma.exact.f32"] = {&fuse_exact, 32, 3, {32, 32, 32}};
  add_conversions(t);
  add_bit_operations(t);
  add_predicates(t);
  return t;
}

}  // namespace

const Instruction* find_instruction(std::string_view name) {
  static const Table table = make_table();
  const auto found = table.find(name);
  return found == table.end() ? nullptr : &found->second;
}

}  // namespace ptx
