// SHUNT_SANITIZED: whether a sanitizer watches memory or threads; gcc and clang say so differently.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SHUNT_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SHUNT_SANITIZED 1
#endif
#endif
#ifndef SHUNT_SANITIZED
#define SHUNT_SANITIZED 0
#endif
