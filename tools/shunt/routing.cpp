#include "routing.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "core/convert.hpp"
#include "cpu/pool.hpp"

namespace shunt::tool {

namespace {

// SplitMix64: a counter is all of its state, so threads start anywhere.
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::vector<double> running_sum(std::vector<double> values) {
  std::partial_sum(values.begin(), values.end(), values.begin());
  return values;
}

}  // namespace

const char* to_string(Spread spread) {
  switch (spread) {
    case Spread::uniform:
      return "uniform";
    case Spread::skewed:
      return "skewed";
    case Spread::zipf:
      return "zipf";
    case Spread::one_hot:
      return "one-hot";
  }
  return "";
}

Spread spread_from_string(const std::string& name) {
  for (const Spread spread : {Spread::uniform, Spread::skewed, Spread::zipf, Spread::one_hot}) {
    if (name == to_string(spread)) return spread;
  }
  throw Error(Status::invalid_argument,
              fmt::format("'{}' is not uniform, skewed, zipf or one-hot", name));
}

RoutingSource::RoutingSource(const RouteSpec& spec, Spread spread, std::uint64_t seed)
    : experts_(spec.experts),
      top_k_(spec.top_k),
      groups_(spec.groups.count),
      keep_(spec.groups.keep),
      spread_(spread),
      random_(seed),
      last_use_(static_cast<std::size_t>(spec.experts), -1) {
  std::vector<double> weights(static_cast<std::size_t>(experts_), 1);
  if (spread == Spread::zipf) {
    std::vector<std::size_t> rank(weights.size());
    std::iota(rank.begin(), rank.end(), std::size_t{0});
    std::shuffle(rank.begin(), rank.end(), random_);
    for (std::size_t e = 0; e < weights.size(); ++e) {
      weights[e] = 1.0 / (1.0 + static_cast<double>(rank[e]));
    }
  }
  if (spread == Spread::skewed) {
    std::normal_distribution<double> normal(0, 0.6);
    for (double& weight : weights) weight = std::exp(normal(random_));
  }
  std::vector<double> of_groups(static_cast<std::size_t>(groups_), 0);
  for (std::size_t e = 0; e < weights.size(); ++e) {
    of_groups[e * of_groups.size() / weights.size()] += weights[e];
  }
  cumulative_ = running_sum(weights);
  group_cumulative_ = running_sum(of_groups);
}

std::vector<std::int32_t> RoutingSource::draw(std::int64_t tokens) {
  const auto pick = [&](const std::vector<double>& cumulative) {
    std::uniform_real_distribution<double> uniform(0, cumulative.back());
    const auto at = std::upper_bound(cumulative.begin(), cumulative.end(), uniform(random_));
    return static_cast<int>(
        std::min(at - cumulative.begin(), static_cast<std::ptrdiff_t>(cumulative.size()) - 1));
  };
  const int size = experts_ / groups_;
  std::vector<char> open(static_cast<std::size_t>(groups_));
  std::vector<std::int32_t> ids;
  ids.reserve(static_cast<std::size_t>(tokens * top_k_));
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::fill(open.begin(), open.end(), groups_ == keep_ ? 1 : 0);
    for (int kept = groups_ == keep_ ? keep_ : 0; kept < keep_;) {
      char& group = open[static_cast<std::size_t>(pick(group_cumulative_))];
      kept += group == 0 ? 1 : 0;
      group = 1;
    }
    const auto row = static_cast<std::ptrdiff_t>(ids.size());
    while (static_cast<std::ptrdiff_t>(ids.size()) < row + top_k_) {
      const std::int32_t id = pick(cumulative_);
      if (open[static_cast<std::size_t>(id / size)] == 0) continue;
      if (std::find(ids.begin() + row, ids.end(), id) == ids.end()) ids.push_back(id);
    }
  }
  return ids;
}

void RoutingSource::rename_to_least_recent(std::vector<std::int32_t>& ids) {
  const std::set<std::int32_t> hit(ids.begin(), ids.end());
  if (static_cast<int>(hit.size()) * 2 > experts_) return;
  const auto groups = static_cast<std::size_t>(groups_);
  const int size = experts_ / groups_;

  // Groups with the most hit experts go to the groups that rested longest.
  std::vector<std::vector<std::int32_t>> hit_in(groups);
  for (const auto id : hit) hit_in[static_cast<std::size_t>(id / size)].push_back(id);
  std::vector<std::size_t> from(groups);
  std::vector<std::size_t> to(groups);
  std::iota(from.begin(), from.end(), std::size_t{0});
  std::iota(to.begin(), to.end(), std::size_t{0});
  std::stable_sort(from.begin(), from.end(), [&](std::size_t a, std::size_t b) {
    return hit_in[a].size() > hit_in[b].size();
  });
  const auto rest = [&](std::size_t group) {
    const auto begin = last_use_.begin() + static_cast<std::ptrdiff_t>(group) * size;
    return std::accumulate(begin, begin + size, std::int64_t{0});
  };
  std::stable_sort(to.begin(), to.end(),
                   [&](std::size_t a, std::size_t b) { return rest(a) < rest(b); });

  std::vector<std::int32_t> name(static_cast<std::size_t>(experts_), -1);
  for (std::size_t g = 0; g < groups; ++g) {
    std::vector<std::int32_t> rested(static_cast<std::size_t>(size));
    std::iota(rested.begin(), rested.end(), static_cast<std::int32_t>(to[g]) * size);
    std::shuffle(rested.begin(), rested.end(), random_);
    std::stable_sort(rested.begin(), rested.end(), [&](std::int32_t a, std::int32_t b) {
      return last_use_[static_cast<std::size_t>(a)] < last_use_[static_cast<std::size_t>(b)];
    });
    for (std::size_t i = 0; i < hit_in[from[g]].size(); ++i) {
      name[static_cast<std::size_t>(hit_in[from[g]][i])] = rested[i];
    }
  }
  for (auto& id : ids) id = name[static_cast<std::size_t>(id)];
}

std::vector<std::int32_t> RoutingSource::next(std::int64_t tokens) {
  std::vector<std::int32_t> ids =
      draw(spread_ == Spread::one_hot ? std::min<std::int64_t>(tokens, 1) : tokens);
  rename_to_least_recent(ids);
  for (const auto id : ids) last_use_[static_cast<std::size_t>(id)] = run_;
  ++run_;
  if (spread_ == Spread::one_hot) {
    const std::vector<std::int32_t> row = ids;
    for (std::int64_t t = 1; t < tokens; ++t) ids.insert(ids.end(), row.begin(), row.end());
  }
  return ids;
}

std::int64_t distinct_experts(const std::vector<std::int32_t>& ids, std::int64_t experts) {
  std::vector<char> hit(static_cast<std::size_t>(experts), 0);
  for (const auto id : ids) {
    if (id >= 0 && id < experts) hit[static_cast<std::size_t>(id)] = 1;
  }
  return std::count(hit.begin(), hit.end(), 1);
}

std::vector<float> unit_rows(std::int64_t experts, std::int64_t hidden, std::uint64_t seed) {
  std::vector<float> rows(static_cast<std::size_t>(experts * hidden));
  for (std::int64_t e = 0; e < experts; ++e) {
    float* row = rows.data() + e * hidden;
    double squares = 0;
    for (std::int64_t i = 0; i < hidden; ++i) {
      const auto bits = mixed(seed + static_cast<std::uint64_t>(e * hidden + i));
      row[i] = static_cast<float>(static_cast<double>(bits >> 11) * 0x1p-52 - 1);
      squares += static_cast<double>(row[i]) * static_cast<double>(row[i]);
    }
    const auto factor = static_cast<float>(1 / std::sqrt(squares));
    for (std::int64_t i = 0; i < hidden; ++i) row[i] *= factor;
  }
  return rows;
}

void states_for(const Context& context, const std::vector<float>& router,
                const std::vector<std::int32_t>& ids, std::int64_t top_k, Tensor out) {
  const std::int64_t hidden = out.shape[1];
  context.pool().split(out.shape[0], 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> sum(static_cast<std::size_t>(hidden));
    for (std::int64_t t = begin; t < end; ++t) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (std::int64_t j = 0; j < top_k; ++j) {
        const float factor = 1.5f - 0.5f * static_cast<float>(j) / static_cast<float>(top_k);
        const float* row = router.data() + ids[static_cast<std::size_t>(t * top_k + j)] * hidden;
        for (std::int64_t i = 0; i < hidden; ++i)
          sum[static_cast<std::size_t>(i)] += factor * row[i];
      }
      for (std::int64_t i = 0; i < hidden; ++i) {
        store_f32(out.data, out.dtype, t * hidden + i, sum[static_cast<std::size_t>(i)]);
      }
    }
  });
}

void logits_for(const Context& context, const std::vector<std::int32_t>& ids, std::int64_t top_k,
                Tensor out) {
  const std::int64_t columns = out.shape[1];
  context.pool().split(out.shape[0], 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t e = 0; e < columns; ++e) {
        const auto bits = mixed(static_cast<std::uint64_t>(t * columns + e));
        store_f32(out.data, out.dtype, t * columns + e, -static_cast<float>(bits >> 40) * 0x1p-24f);
      }
      for (std::int64_t j = 0; j < top_k; ++j) {
        store_f32(out.data, out.dtype, t * columns + ids[static_cast<std::size_t>(t * top_k + j)],
                  1.5f - 0.5f * static_cast<float>(j) / static_cast<float>(top_k));
      }
    }
  });
}

RandomPool::RandomPool(const Context& context, DType dtype, std::int64_t elements,
                       std::uint64_t seed)
    : dtype_(dtype), elements_((elements + 63) / 64 * 64) {
  buffer_ = context.allocate(static_cast<std::size_t>(bytes(dtype, elements_)));
  // Sign and mantissa are random, the exponent is one of three: neither denormals nor overflow.
  const bool wide = dtype == DType::f32;
  const std::uint64_t keep = wide                   ? 0x807fffff807fffffu
                             : dtype == DType::bf16 ? 0x807f807f807f807fu
                                                    : 0x83ff83ff83ff83ffu;
  const int shift = wide ? 23 : dtype == DType::bf16 ? 7 : 10;
  const std::uint64_t lowest = dtype == DType::f16 ? 9 : 121;
  const int width = wide ? 32 : 16;
  auto* words = static_cast<std::uint64_t*>(buffer_.data());
  context.pool().split(
      bytes(dtype, elements_) / 8, 4096, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const std::uint64_t r = mixed(seed * 0x2545f4914f6cdd1du + static_cast<std::uint64_t>(i));
          std::uint64_t exponents = 0;
          for (int lane = 0; lane < 64; lane += width) {
            exponents |= (lowest + ((r >> (lane + shift)) & 3) % 3) << (lane + shift);
          }
          words[i] = (r & keep) | exponents;
        }
      });
}

const char* RandomPool::advance(std::int64_t elements) {
  if (next_ + elements > elements_) next_ = 0;
  const auto* data = static_cast<const char*>(buffer_.data()) + bytes(dtype_, next_);
  next_ += (elements + 63) / 64 * 64;  // stays 64-byte aligned for every dtype
  return data;
}

Tensor RandomPool::take(std::int64_t rows, std::int64_t columns) {
  return view(advance(rows * columns), dtype_, {rows, columns});
}

Tensor RandomPool::take(std::int64_t elements) {
  return view(advance(elements), dtype_, {elements});
}

}  // namespace shunt::tool
