// From the logits of one token to its ids and weights. Included by files compiled for one
// instruction set, inside its unnamed namespace, after policy.hpp and rule.hpp. All arithmetic is
// that of policy.hpp: loops over experts run on whole blocks of row_pad, whose rest is -inf.

constexpr int max_top_k = 64;
constexpr int max_groups = 64;
constexpr int max_shared = 64;
static_assert(sum_lanes == row_pad);

constexpr float minus_infinity = -__builtin_inff();

SHUNT_INLINE float fold_lanes(float (&lanes)[sum_lanes]) {
  for (int half = sum_lanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

float largest_of(const float* values, std::int64_t size) {
  float lanes[row_pad];
  for (int i = 0; i < row_pad; ++i) lanes[i] = values[i];
  for (std::int64_t b = row_pad; b < size; b += row_pad) {
    for (int i = 0; i < row_pad; ++i) lanes[i] = larger(lanes[i], values[b + i]);
  }
  float best = lanes[0];
  for (int i = 1; i < row_pad; ++i) best = larger(best, lanes[i]);
  return best;
}

// Scale, bias, clean, cap; -inf up to `size`. The shared experts' columns go to `shared`.
void finish_logits(const Rule& rule, float* logits, std::int64_t size, float* shared) {
  for (int c = 0; c < rule.columns; ++c) {
    const float scaled = logits[c] * rule.logit_scale;
    logits[c] = sanitised(rule.router_bias != nullptr ? scaled + rule.router_bias[c] : scaled);
  }
  if (rule.soft_cap > 0) {
    for (int c = 0; c < rule.columns; ++c) {
      logits[c] = sanitised(soft_capped(logits[c], rule.soft_cap));
    }
  }
  for (int c = rule.experts; c < rule.columns; ++c) shared[c - rule.experts] = logits[c];
  for (std::int64_t e = rule.experts; e < size; ++e) logits[e] = minus_infinity;
}

void softmax(const float* logits, std::int64_t size, float* scores) {
  const float best = largest_of(logits, size);
  float lanes[sum_lanes] = {};
  for (std::int64_t b = 0; b < size; b += row_pad) {
    for (int i = 0; i < row_pad; ++i) {
      scores[b + i] = exp_of_negative(logits[b + i] - best);
      lanes[i] += scores[b + i];
    }
  }
  const float sum = fold_lanes(lanes);
  for (std::int64_t e = 0; e < size; ++e) scores[e] = scores[e] / sum;
}

// The sum of the two best of values[0, count); the best alone when there is no other.
float sum_of_two_best(const float* values, int count) {
  constexpr int width = 8;
  float first[width];
  float second[width];
  for (int i = 0; i < width; ++i) first[i] = second[i] = minus_infinity;
  int v = 0;
  for (; v + width <= count; v += width) {
    for (int i = 0; i < width; ++i) {
      second[i] = larger(second[i], smaller(first[i], values[v + i]));
      first[i] = larger(first[i], values[v + i]);
    }
  }
  for (int i = 0; v + i < count; ++i) {
    second[i] = larger(second[i], smaller(first[i], values[v + i]));
    first[i] = larger(first[i], values[v + i]);
  }
  for (int i = 1; i < width; ++i) {
    second[0] = larger(larger(second[0], second[i]), smaller(first[0], first[i]));
    first[0] = larger(first[0], first[i]);
  }
  return count == 1 ? first[0] : first[0] + second[0];
}

std::int64_t best_key(const std::int64_t* keys, std::int64_t count) {
  std::int64_t best = keys[0];
  for (std::int64_t i = 1; i < count; ++i) best = keys[i] > best ? keys[i] : best;
  return best;
}

// Experts of all but the `keep` best groups lose their keys.
void drop_groups(const Rule& rule, const float* ranked, std::int64_t* keys) {
  std::int64_t group_keys[max_groups];
  for (int g = 0; g < rule.groups; ++g) {
    const float* group = ranked + std::int64_t{g} * rule.group_size;
    float rank = group[0];
    if (rule.rank_by_two_best) {
      rank = sum_of_two_best(group, rule.group_size);
    } else {
      for (int i = 1; i < rule.group_size; ++i) rank = larger(rank, group[i]);
    }
    group_keys[g] = key_of(rank, g);
  }
  for (int i = 0; i < rule.keep; ++i) {
    group_keys[id_of(best_key(group_keys, rule.groups))] = no_key;
  }
  for (int g = 0; g < rule.groups; ++g) {
    if (group_keys[g] == no_key) continue;
    std::int64_t* group = keys + std::int64_t{g} * rule.group_size;
    for (int i = 0; i < rule.group_size; ++i) group[i] = no_key;
  }
}

// The k best of `size` keys, best first. Two levels: the best key of each block is kept, so that a
// round looks at the blocks and at one block. A group that has given its limit loses its keys.
void take_best(const Rule& rule, const Scratch& scratch, std::int64_t size, std::int32_t* ids) {
  std::int32_t left[max_groups];
  if (rule.group_limit > 0) {
    for (int g = 0; g < rule.groups; ++g) left[g] = rule.group_limit;
  }
  const std::int64_t blocks = size / row_pad;
  for (std::int64_t b = 0; b < blocks; ++b) {
    scratch.best[b] = best_key(scratch.keys + b * row_pad, row_pad);
  }
  for (int i = 0; i < rule.top_k; ++i) {
    const std::int32_t id = id_of(best_key(scratch.best, blocks));
    ids[i] = id;
    std::int32_t begin = id, end = id + 1;
    if (rule.group_limit > 0 && --left[id / rule.group_size] == 0) {
      begin = id / rule.group_size * rule.group_size;
      end = begin + rule.group_size;
    }
    for (std::int32_t e = begin; e < end; ++e) scratch.keys[e] = no_key;
    for (std::int64_t block = begin / row_pad; block * row_pad < end; ++block) {
      scratch.best[block] = best_key(scratch.keys + block * row_pad, row_pad);
    }
  }
}

// p of every expert into scratch.scores, as far as the rule needs them all.
void score_all(const Rule& rule, const Scratch& scratch, std::int64_t size) {
  if (rule.weigh == Weigh::softmax_of_all) {
    softmax(scratch.logits, size, scratch.scores);
  } else if (rule.scores_rank && rule.weigh == Weigh::sigmoid) {
    for (std::int64_t e = 0; e < size; ++e) scratch.scores[e] = sigmoid(scratch.logits[e]);
  } else if (rule.scores_rank && rule.weigh == Weigh::sqrt_softplus) {
    for (std::int64_t e = 0; e < size; ++e) scratch.scores[e] = sqrt_softplus(scratch.logits[e]);
  }
}

void select_ids(const Rule& rule, const Scratch& scratch, std::int64_t size, std::int32_t* ids) {
  const float* ranking = rule.scores_rank ? scratch.scores : scratch.logits;
  const float* compared = scratch.logits;
  if (rule.selection_bias != nullptr) {
    for (int e = 0; e < rule.experts; ++e) {
      scratch.compared[e] = sanitised(ranking[e] + rule.selection_bias[e]);
    }
    ranking = compared = scratch.compared;
  }
  for (int e = 0; e < rule.experts; ++e) scratch.keys[e] = key_of(compared[e], e);
  for (std::int64_t e = rule.experts; e < size; ++e) scratch.keys[e] = no_key;
  if (rule.groups > 1) drop_groups(rule, ranking, scratch.keys);
  take_best(rule, scratch, size, ids);
}

void sparsemixer(const Rule& rule, const Scratch& scratch, std::int64_t size,
                 const std::int32_t* ids, float* weights) {
  float* left = scratch.compared;
  for (std::int64_t e = 0; e < size; ++e) left[e] = scratch.logits[e];
  for (int k = 0; k < rule.top_k; ++k) {
    const float best = left[ids[k]];
    float lanes[sum_lanes] = {};
    for (std::int64_t b = 0; b < size; b += row_pad) {
      for (int i = 0; i < row_pad; ++i) {
        const float l = left[b + i];
        lanes[i] += sparsemixer_keeps(l, best, rule.twice_jitter) ? exp_of_negative(l - best) : 0;
      }
    }
    weights[k] = 1.0F / fold_lanes(lanes);
    left[ids[k]] = minus_infinity;
  }
}

// p of the selected, unbiased.
void weigh(const Rule& rule, const Scratch& scratch, std::int64_t size, const std::int32_t* ids,
           float* weights) {
  const float* logits = scratch.logits;
  switch (rule.weigh) {
    case Weigh::logit:
      for (int k = 0; k < rule.top_k; ++k) weights[k] = logits[ids[k]];
      break;
    case Weigh::softmax_of_all:
      for (int k = 0; k < rule.top_k; ++k) weights[k] = scratch.scores[ids[k]];
      break;
    case Weigh::softmax_of_selected: {
      float best = logits[ids[0]];
      for (int k = 1; k < rule.top_k; ++k) best = larger(best, logits[ids[k]]);
      float sum = 0;
      for (int k = 0; k < rule.top_k; ++k) {
        weights[k] = exp_of_negative(logits[ids[k]] - best);
        sum += weights[k];
      }
      for (int k = 0; k < rule.top_k; ++k) weights[k] = weights[k] / sum;
      break;
    }
    case Weigh::sigmoid:
      for (int k = 0; k < rule.top_k; ++k) weights[k] = sigmoid(logits[ids[k]]);
      break;
    case Weigh::sqrt_softplus:
      for (int k = 0; k < rule.top_k; ++k) weights[k] = sqrt_softplus(logits[ids[k]]);
      break;
    case Weigh::sparsemixer:
      sparsemixer(rule, scratch, size, ids, weights);
      break;
  }
}

void select(const Rule& rule, const Scratch& scratch, const std::int32_t* hashed,
            const float* shared_logits, const RowOutputs& out) {
  const std::int64_t size = padded(rule.experts);
  std::int32_t ids[max_top_k + max_shared];
  float weights[max_top_k + max_shared];
  float joint[max_shared];
  finish_logits(rule, scratch.logits, size, joint);
  if (out.logits != nullptr) {
    for (int e = 0; e < rule.experts; ++e) out.logits[e] = scratch.logits[e];
    for (int c = rule.experts; c < rule.columns; ++c) out.logits[c] = joint[c - rule.experts];
  }
  score_all(rule, scratch, size);
  if (hashed != nullptr) {
    for (int k = 0; k < rule.top_k; ++k) ids[k] = hashed[k];
  } else {
    select_ids(rule, scratch, size, ids);
  }
  weigh(rule, scratch, size, ids, weights);

  float sum = 0;
  for (int k = 0; k < rule.top_k; ++k) sum += weights[k];
  float* shared = weights + rule.top_k;
  for (int i = 0; i < rule.shared_count; ++i) {
    ids[rule.top_k + i] = rule.experts + i;
    switch (rule.shared) {
      case Shared::constant:
        shared[i] = rule.shared_constant;
        break;
      case Shared::sum_over_scale:
        shared[i] = sum / rule.scale;
        break;
      case Shared::gate:
        shared[i] = sigmoid(sanitised(shared_logits[i]));
        break;
      case Shared::joint:
        shared[i] = rule.weigh == Weigh::sigmoid ? sigmoid(joint[i]) : sqrt_softplus(joint[i]);
        break;
    }
  }
  int weighed = rule.top_k;  // slots that renormalisation and scale apply to
  if (rule.shared == Shared::joint) {
    weighed = rule.slots();
    for (int i = 0; i < rule.shared_count; ++i) sum += shared[i];
  }
  for (int k = 0; k < weighed; ++k) {
    float w = weights[k];
    if (rule.renormalize) w = renormalised(w, sum, rule.epsilon, rule.epsilon_is_floor);
    w = w * rule.factor;
    if (rule.per_expert_scale != nullptr) w = w * rule.per_expert_scale[ids[k]];
    weights[k] = w;
  }
  for (int k = 0; k < rule.slots(); ++k) weights[k] = finite_weight(weights[k]);

  if (out.ids != nullptr) {
    for (int k = 0; k < rule.slots(); ++k) out.ids[k] = ids[k];
  }
  if (out.replay != nullptr) {
    for (int k = 0; k < rule.top_k; ++k) out.replay[k] = static_cast<std::int16_t>(ids[k]);
  }
  if (out.weights != nullptr) {
    for (int k = 0; k < rule.slots(); ++k) out.weights[k] = weights[k];
  }
  if (out.dense != nullptr) {
    for (int e = 0; e < rule.experts + rule.shared_count; ++e) out.dense[e] = 0;
    for (int k = 0; k < rule.slots(); ++k) {
      out.dense[ids[k]] = finite_weight(out.dense[ids[k]] + weights[k]);
    }
  }
}
