// The functions of the table's rows, a group a file in families/.
#pragma once

#include "checkpoint/family.hpp"

namespace shunt::families {

// families/softmax.cpp
Plan mixtral(Config& c);
Plan minimax(Config& c);
Plan qwen2_moe(Config& c);
Plan qwen3_moe(Config& c);
Plan sdar_moe(Config& c);
Plan rnd1(Config& c);
Plan pangu_pro_moe(Config& c);
Plan llada_moe(Config& c);
Plan iquest_q1(Config& c);
Plan qwen3_next(Config& c);
Plan qwen3_vl_moe(Config& c);
Plan qwen3_5_moe(Config& c);
Plan qwen3_omni_moe(Config& c);
Plan mellum(Config& c);
Plan lara_mini(Config& c);
Plan olmoe(Config& c);
Plan hunyuan_v1_moe(Config& c);
Plan ernie4_5_moe(Config& c);
Plan ernie4_5_vl_moe(Config& c);
Plan ernie4_5_moe_vl(Config& c);
Plan jamba(Config& c);
Plan dbrx(Config& c);
Plan longcat_flash(Config& c);
Plan gemma4(Config& c);

// families/remote_code.cpp
Plan grok1(Config& c);
Plan grok2(Config& c);
Plan arctic(Config& c);
Plan minicpm(Config& c);
Plan xverse(Config& c);
Plan smallthinker(Config& c);

// families/top_k.cpp
Plan gpt_oss(Config& c);
Plan openai_privacy_filter(Config& c);
Plan granitemoe(Config& c);
Plan granitemoehybrid(Config& c);
Plan jetmoe(Config& c);
Plan aria(Config& c);
Plan cohere2_moe(Config& c);
Plan phimoe(Config& c);
Plan llama4(Config& c);

// families/deepseek.cpp
Plan deepseek_v2(Config& c);
Plan deepseek_ocr2(Config& c);
Plan mistral4(Config& c);
Plan mistral_large4(Config& c);
Plan deepseek_v3(Config& c);
Plan deepseek_v32(Config& c);
Plan deepseek_v4(Config& c);
Plan deepseek_v41(Config& c);
Plan gigachat3_5(Config& c);
Plan pangu(Config& c);
Plan glm4_moe(Config& c);
Plan sarvam(Config& c);
Plan glm4_moe_lite(Config& c);
Plan glm_moe_dsa(Config& c);
Plan glm5_next(Config& c);
Plan solar_open(Config& c);
Plan axk1(Config& c);
Plan axk2(Config& c);
Plan dots1(Config& c);
Plan dots3_note(Config& c);
Plan beam(Config& c);
Plan mimo_v2_flash(Config& c);
Plan bailing_moe(Config& c);
Plan bailing_moe_v2(Config& c);
Plan bailing_hybrid(Config& c);
Plan llada2_moe(Config& c);
Plan param2moe(Config& c);
Plan exaone_moe(Config& c);
Plan kimi_linear(Config& c);
Plan hy_v4(Config& c);

// families/sigmoid.cpp
Plan hy_v3(Config& c);
Plan minimax_m2(Config& c);
Plan minimax_m3(Config& c);
Plan lfm2_moe(Config& c);
Plan afmoe(Config& c);
Plan laguna(Config& c);
Plan step3(Config& c);
Plan step3p5(Config& c);
Plan step5(Config& c);
Plan nemotron_h(Config& c);
Plan nemotron_h_puzzle(Config& c);
Plan alice_ai(Config& c);
Plan k2_horizon(Config& c);
Plan inkling(Config& c);
Plan inkling2(Config& c);
Plan flint(Config& c);
Plan muse_spark(Config& c);
Plan kolibri1(Config& c);

}  // namespace shunt::families
