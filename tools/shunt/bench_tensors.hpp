// What the cases of a benchmark are made of: tensors in many copies, ids and their order, and
// copies on the host to check with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "routing.hpp"
#include "shunt/context.hpp"
#include "shunt/order.hpp"

namespace shunt::tool {

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// How many copies of what a call moves it takes to pass rotate_bytes: 8 to 256, fewer where memory
// is short.
std::int64_t variants_for(double bytes_of_a_call, std::int64_t rotate_bytes);
// Throws Error{unsupported} with the reason of a no.
void require(const Support& support);
// Throws the Error{internal} of a result that is not the CPU engine's.
[[noreturn]] void differs(const std::string& label, const std::string& how);
// The engine that results are checked with.
const Context& host();

// Tensors of one shape in one allocation, each on a boundary of 256 bytes. Empty: not given.
class Variants {
 public:
  Variants() = default;
  Variants(const Context& context, DType dtype, std::vector<std::int64_t> shape,
           std::int64_t count);
  Tensor operator[](std::int64_t i) const;
  std::int64_t count() const { return count_; }

 private:
  Device device_;
  DType dtype_ = DType::f32;
  std::vector<std::int64_t> shape_;
  std::int64_t count_ = 0, stride_ = 0;
  Buffer memory_;
};
// Each with normal deviates of its own.
void fill(const Context& context, const Variants& tensors, float deviation, std::uint64_t seed);

// A copy of a dense tensor on the host; also the memory of a result there.
struct OnHost {
  OnHost(const Context& context, const Tensor& there);
  const std::int32_t* ints() const { return tensor.as<std::int32_t>(); }
  const float* floats() const { return tensor.as<float>(); }
  Buffer memory;
  Tensor tensor;
};

// Element i of a dense tensor of f32 | bf16 | f16 on the host.
float element(const Tensor& tensor, std::int64_t i);
void put_element(const Tensor& tensor, std::int64_t i, float value);
// Throws what differs() does unless each |got - want| is at most tolerance * (0.1 + |want|).
void check_close(const std::string& label, const OnHost& got, const OnHost& want,
                 float tolerance = 0.01f);

// A few draws of ids [tokens, top_k], and the order of each by the CPU engine.
struct Batches {
  Batches(const RouteSpec& route, Spread spread, std::int64_t tokens);
  OrderSpec spec;
  std::vector<std::vector<std::int32_t>> ids, offsets, permutation, inverse;
};
// Rewrites the copies of logits [tokens, columns] so that routing goes as `spread` says; random
// ones are uniform as they are, and stay.
void steer_logits(const Context& context, const RouteSpec& route, Spread spread,
                  const Variants& logits);
// The same for hidden states [tokens, hidden], copy i for the router [columns, hidden] i % routers.
void steer_states(const Context& context, const RouteSpec& route, Spread spread,
                  const std::vector<std::vector<float>>& routers, const Variants& states);
// Routers [columns, hidden] on the host, in f32; none where nothing is to be steered.
std::vector<std::vector<float>> routers_of(const Context& context, Spread spread,
                                           const Variants& routers);
std::vector<float> floats_of(const Context& context, const Tensor& there);
// Draw i into copy i; copies beyond the draws repeat them at other places.
void upload(const Context& context, const Variants& to,
            const std::vector<std::vector<std::int32_t>>& drawn);

}  // namespace shunt::tool
