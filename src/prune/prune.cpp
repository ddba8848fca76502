#include "prune/prune.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "cpu/pool.hpp"
#include "format/codes.hpp"
#include "format/rules.hpp"
#include "prune/factor.hpp"

namespace shunt {

namespace {

// Rows that share one reading of the factor, and columns whose errors are applied together.
constexpr std::int64_t rows_a_task = 16;
constexpr std::int64_t columns_at_once = 128;
constexpr std::int64_t block = 16;  // of columns that have a scale
static_assert(columns_at_once % (2 * block) == 0 && block % 4 == 0);

double square(double x) { return x * x; }

// Which of up to four scores stay: bits. Two at most, of equal ones the first.
template <class Score>
unsigned two_largest(const Score* scores, std::int64_t count) {
  if (count <= 2) return (1u << count) - 1;
  unsigned kept = 0;
  for (int pass = 0; pass < 2; ++pass) {
    std::int64_t best = -1;
    for (std::int64_t i = 0; i < count; ++i) {
      if ((kept >> i & 1) == 0 && (best < 0 || scores[i] > scores[best])) best = i;
    }
    kept |= 1u << best;
  }
  return kept;
}

// The same of two pairs, of which `count` may cut the second short.
template <class Score>
unsigned larger_pair(const Score& first, const Score& second, std::int64_t count) {
  return count <= 2 || first >= second ? 3u & ((1u << count) - 1) : 12u & ((1u << count) - 1);
}

// score(weight, k) of every weight, of equal ones its magnitude; zeroes what does not stay.
template <class Score>
void prune_by_score(const Context& context, PrunePattern pattern, float* w, std::int64_t n,
                    std::int64_t k, const Score& score) {
  context.pool().split(n, 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      float* const values = w + row * k;
      for (std::int64_t first = 0; first < k; first += 4) {
        const std::int64_t count = std::min<std::int64_t>(4, k - first);
        using Scores = std::pair<double, double>;
        std::array<Scores, 4> scores{};
        for (std::int64_t i = 0; i < count; ++i) {
          const auto value = static_cast<double>(values[first + i]);
          scores[static_cast<std::size_t>(i)] = {score(value, first + i), std::fabs(value)};
        }
        const auto of_pair = [](const Scores& a, const Scores& b) {
          return Scores{square(a.first) + square(b.first), square(a.second) + square(b.second)};
        };
        const unsigned kept =
            pattern == PrunePattern::pairs
                ? larger_pair(of_pair(scores[0], scores[1]), of_pair(scores[2], scores[3]), count)
                : two_largest(scores.data(), count);
        for (std::int64_t i = 0; i < count; ++i) {
          if ((kept >> i & 1) == 0) values[first + i] = 0;
        }
      }
    }
  });
}

// Rows [0, rows) of w, `width` wide, through all columns. u: the upper factor of H^-1. w_F's
// inverse is u_F^T u_F, so that [H_F^-1]_k,F / [H_F^-1]_kk is u_k,F / u_kk, and [H_F^-1]_kk of the
// first column of F is u_kk^2.
void prune_rows_obs(const std::vector<double>& u, PrunePattern pattern, float* w, std::int64_t rows,
                    std::int64_t width, float global, std::uint8_t* scales) {
  const bool pairs = pattern == PrunePattern::pairs;
  const std::int64_t scaled = pairs ? 2 * block : block;  // columns under one scale
  std::vector<double> values(static_cast<std::size_t>(rows * width));
  std::copy_n(w, rows * width, values.begin());
  std::vector<double> errors(static_cast<std::size_t>(rows * columns_at_once));
  std::array<unsigned, rows_a_task> kept{};
  std::array<double, rows_a_task> units{};  // scale * global of the block at hand
  // Of up to four columns from c on.
  const auto kept_of = [&](const double* row, std::int64_t c) {
    const std::int64_t count = std::min<std::int64_t>(4, width - c);
    std::array<double, 4> scores{};
    for (std::int64_t i = 0; i < count; ++i) {
      const double* const factor = u.data() + (c + i) * (width + 1);
      double value = row[c + i];
      // What zeroing the first of a pair would have left of the second.
      if (pairs && i % 2 == 1) value -= row[c + i - 1] / factor[-width - 1] * factor[-width];
      scores[static_cast<std::size_t>(i)] = square(value / *factor);
    }
    if (pairs) return larger_pair(scores[0] + scores[1], scores[2] + scores[3], count);
    return two_largest(scores.data(), count);
  };
  const auto block_unit = [&](std::int64_t r, std::int64_t c) {
    const double* const row = values.data() + r * width;
    std::array<float, 2 * block> stays{};
    for (std::int64_t four = c; four < std::min(c + scaled, width); four += 4) {
      const unsigned stay = kept_of(row, four);
      for (std::int64_t i = 0; i < std::min<std::int64_t>(4, width - four); ++i) {
        if ((stay >> i & 1) != 0) {
          stays[static_cast<std::size_t>(four - c + i)] = static_cast<float>(row[four + i]);
        }
      }
    }
    const std::int64_t blocks = (width + block - 1) / block;
    const std::uint8_t scale = nvfp4_fitted_scale(stays.data(), scaled, global);
    for (std::int64_t at = c; at < std::min(c + scaled, width); at += block) {
      scales[r * blocks + at / block] = scale;
    }
    return static_cast<double>(e4m3_to_f32(scale)) * static_cast<double>(global);
  };
  for (std::int64_t begin = 0; begin < width; begin += columns_at_once) {
    const std::int64_t end = std::min(begin + columns_at_once, width);
    for (std::int64_t c = begin; c < end; ++c) {
      const double* const factor = u.data() + c * width;
      for (std::int64_t r = 0; r < rows; ++r) {
        double* const row = values.data() + r * width;
        const auto at = static_cast<std::size_t>(r);
        if (scales != nullptr && c % scaled == 0) units[at] = block_unit(r, c);
        if (c % 4 == 0) kept[at] = kept_of(row, c);
        double stays = row[c];
        if ((kept[at] >> (c % 4) & 1) == 0) {
          stays = 0;
        } else if (scales != nullptr) {
          stays = static_cast<double>(e2m1_values[to_e2m1(row[c], units[at])]) * units[at];
        }
        double error = 0;
        if (stays != row[c]) {
          error = (row[c] - stays) / factor[c];
          row[c] = stays;
          for (std::int64_t j = c + 1; j < end; ++j) row[j] -= error * factor[j];
        }
        errors[static_cast<std::size_t>(r * columns_at_once + c - begin)] = error;
      }
    }
    for (std::int64_t c = begin; c < end; ++c) {
      const double* const factor = u.data() + c * width;
      for (std::int64_t r = 0; r < rows; ++r) {
        const double error = errors[static_cast<std::size_t>(r * columns_at_once + c - begin)];
        if (error == 0) continue;
        double* const row = values.data() + r * width;
        for (std::int64_t j = end; j < width; ++j) row[j] -= error * factor[j];
      }
    }
  }
  for (std::size_t i = 0; i < values.size(); ++i) w[i] = static_cast<float>(values[i]);
}

void check_statistics(const PruneSpec& spec, std::int64_t k, const InputStatistics* statistics) {
  const std::string method = to_string(spec.method);
  if (statistics == nullptr) {
    fail(Status::invalid_argument, "prune: statistics are missing: {} needs those of the inputs",
         method);
  }
  if (statistics->width() != k) {
    fail(Status::invalid_argument, "prune: statistics are of {} columns: the matrix has {}",
         statistics->width(), k);
  }
  if (spec.method == PruneMethod::obs && !statistics->has_products()) {
    fail(Status::invalid_argument, "prune: statistics are without products: obs needs them");
  }
}

}  // namespace

std::string to_string(PruneMethod method) {
  return method == PruneMethod::magnitude ? "magnitude"
         : method == PruneMethod::wanda   ? "wanda"
                                          : "obs";
}

PruneMethod prune_method_from_string(const std::string& text) {
  for (const PruneMethod method : {PruneMethod::magnitude, PruneMethod::wanda, PruneMethod::obs}) {
    if (to_string(method) == text) return method;
  }
  fail(Status::invalid_argument, "pruning method is '{}': must be magnitude, wanda or obs", text);
}

std::string to_string(PrunePattern pattern) {
  return pattern == PrunePattern::pairs ? "2:4-pairs" : "2:4";
}

PrunePattern prune_pattern_from_string(const std::string& text) {
  for (const PrunePattern pattern : {PrunePattern::two_of_four, PrunePattern::pairs}) {
    if (to_string(pattern) == text) return pattern;
  }
  fail(Status::invalid_argument, "pruning pattern is '{}': must be 2:4 or 2:4-pairs", text);
}

PruneMethod prune_2_of_4(const Context& context, const PruneSpec& spec, float* w, std::int64_t n,
                         std::int64_t k, const InputStatistics* statistics,
                         PruneRounding* rounding) {
  if (spec.method != PruneMethod::magnitude) check_statistics(spec, k, statistics);
  if (std::isnan(spec.damping) || spec.damping < 0 || spec.damping > 1) {
    fail(Status::invalid_argument, "prune: damping is {}: must be 0 to 1", spec.damping);
  }
  for (std::int64_t i = 0; i < n * k; ++i) {
    if (!std::isfinite(w[i])) {
      fail(Status::invalid_argument, "prune: weight [{}, {}] is {}: must be finite", i / k, i % k,
           w[i]);
    }
  }
  PruneMethod method = spec.method;
  if (method != PruneMethod::magnitude && statistics->rows() == 0) method = PruneMethod::magnitude;
  if (method == PruneMethod::obs) {
    const std::vector<double> u = inverse_factor(statistics->products(), k, spec.damping);
    if (u.empty()) {
      method = PruneMethod::magnitude;
    } else {
      const std::int64_t blocks = (k + block - 1) / block;
      if (rounding != nullptr) rounding->scales.assign(static_cast<std::size_t>(n * blocks), 0);
      context.pool().run([&](cpu_engine::Team& team) {
        const std::int64_t tasks = (n + rows_a_task - 1) / rows_a_task;
        team.for_each(static_cast<std::size_t>(tasks), [&](std::size_t task) {
          const std::int64_t first = static_cast<std::int64_t>(task) * rows_a_task;
          prune_rows_obs(u, spec.pattern, w + first * k, std::min(rows_a_task, n - first), k,
                         rounding != nullptr ? rounding->global : 1,
                         rounding != nullptr ? rounding->scales.data() + first * blocks : nullptr);
        });
      });
      return method;
    }
  }
  if (method == PruneMethod::wanda) {
    const std::vector<double>& squares = statistics->squares();
    const auto finite = [](double x) { return std::isfinite(x); };
    const auto zero = [](double x) { return x == 0; };
    if (!std::all_of(squares.begin(), squares.end(), finite) ||
        std::all_of(squares.begin(), squares.end(), zero)) {
      method = PruneMethod::magnitude;
    }
  }
  if (method == PruneMethod::wanda) {
    std::vector<double> norms(static_cast<std::size_t>(k));
    for (std::size_t i = 0; i < norms.size(); ++i) norms[i] = std::sqrt(statistics->squares()[i]);
    prune_by_score(context, spec.pattern, w, n, k, [&](double value, std::int64_t column) {
      return std::fabs(value) * norms[static_cast<std::size_t>(column)];
    });
  } else {
    prune_by_score(context, spec.pattern, w, n, k,
                   [](double value, std::int64_t) { return std::fabs(value); });
  }
  return method;
}

}  // namespace shunt
