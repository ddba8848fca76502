// Elementary functions on the vectors of simd_*.hpp. Include after one of those, in the same
// unnamed namespace. Errors are over all finite arguments, in units of the last place, with FMA.

// e^x: 1.5 ulp; overflows to infinity, underflows gradually.
SHUNT_INLINE F32 exp(F32 x) {
  // Beyond these, infinity and 0 are certain. The order of the operands lets a NaN through.
  x = max(set1(-120.0F), min(set1(120.0F), x));
  const F32 n = round(mul(x, set1(1.44269504F)));
  // ln 2 in two parts; n times the first is exact even without FMA.
  F32 r = fma(n, set1(-0.693359375F), x);
  r = fma(n, set1(2.12194440e-4F), r);
  F32 p = set1(1.9875691500e-4F);
  p = fma(p, r, set1(1.3981999507e-3F));
  p = fma(p, r, set1(8.3334519073e-3F));
  p = fma(p, r, set1(4.1665795894e-2F));
  p = fma(p, r, set1(1.6666665459e-1F));
  p = fma(p, r, set1(5.0000001201e-1F));
  p = fma(mul(p, r), r, add(r, set1(1.0F)));
  // 2^n as two factors: one alone would leave the range of exponents.
  const F32 half = round(mul(n, set1(0.5F)));
  return mul(mul(p, power_of_two(half)), power_of_two(sub(n, half)));
}

// x / (1 + e^(-z)): x sigmoid(z).
SHUNT_INLINE F32 mul_sigmoid(F32 x, F32 z) { return div(x, add(set1(1.0F), exp(sub(zero(), z)))); }

// x Phi(x) = x erfc(-x / sqrt 2) / 2. erfc(z) = e^(-z^2) t Q(t) with t = 1 / (1 + 0.3 z) for z >=
// 0; Q interpolates at Chebyshev nodes, relative error 2.5e-8.
SHUNT_INLINE F32 gelu(F32 x) {
  const F32 z = mul(abs(x), set1(0.70710678F));
  const F32 t = div(set1(1.0F), fma(z, set1(0.3F), set1(1.0F)));
  F32 q = set1(-0.130770877F);
  q = fma(q, t, set1(0.491934271F));
  q = fma(q, t, set1(-0.526151663F));
  q = fma(q, t, set1(0.564514242F));
  q = fma(q, t, set1(-0.106983362F));
  q = fma(q, t, set1(0.220539169F));
  q = fma(q, t, set1(0.146796022F));
  q = fma(q, t, set1(0.170949120F));
  q = fma(q, t, set1(0.169173058F));
  const F32 tail = mul(mul(t, q), exp(mul(set1(-0.5F), mul(x, x))));
  return mul(mul(set1(0.5F), x), select_positive(x, sub(set1(2.0F), tail), tail));
}

// x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2 = x sigmoid(2 sqrt(2/pi) (..)).
SHUNT_INLINE F32 gelu_tanh(F32 x) {
  const F32 cubic = fma(mul(set1(0.0713548163F), mul(x, x)), x, mul(set1(1.59576912F), x));
  return mul_sigmoid(x, cubic);
}

// tanh x: 4 ulp. Up to 0.625 x + x^3 P(x^2), P of the least relative error, 5e-9; beyond,
// 1 - 2 / (1 + e^(2 |x|)).
SHUNT_INLINE F32 tanh(F32 x) {
  const F32 size = abs(x), square = mul(x, x);
  F32 p = set1(-0.0057049864F);
  p = fma(p, square, set1(0.020639086F));
  p = fma(p, square, set1(-0.053739715F));
  p = fma(p, square, set1(0.13331442F));
  p = fma(p, square, set1(-0.3333328F));
  const F32 near = fma(mul(p, square), size, size);
  const F32 far = sub(set1(1.0F), div(set1(2.0F), add(set1(1.0F), exp(add(size, size)))));
  const F32 h = select_positive(sub(size, set1(0.625F)), far, near);
  return mul(h, select_positive(x, set1(1.0F), set1(-1.0F)));
}
