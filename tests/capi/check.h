/* Checks that print where they fail and go on. */
#ifndef SHUNT_TESTS_CAPI_CHECK_H
#define SHUNT_TESTS_CAPI_CHECK_H

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "shunt/c/shunt.h"

extern int failures;

#define CHECK(condition)                                             \
  do {                                                               \
    if (!(condition)) {                                              \
      printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                    \
    }                                                                \
  } while (0)

#define CHECK_OK(call)                                                                      \
  do {                                                                                      \
    const shunt_status status_ = (call);                                                    \
    if (status_ != SHUNT_OK || strcmp(shunt_last_error(), "") != 0) {                       \
      printf("%s:%d: %s: %s (%s)\n", __FILE__, __LINE__, #call, shunt_status_name(status_), \
             shunt_last_error());                                                           \
      ++failures;                                                                           \
    }                                                                                       \
  } while (0)

/* The call fails with that status, and the message has those words. */
#define CHECK_FAILS(status, words, call)                                      \
  do {                                                                        \
    const shunt_status status_ = (call);                                      \
    if (status_ != (status) || strstr(shunt_last_error(), words) == NULL) {   \
      printf("%s:%d: %s: %s, '%s' expected: %s\n", __FILE__, __LINE__, #call, \
             shunt_status_name(status_), words, shunt_last_error());          \
      ++failures;                                                             \
    }                                                                         \
  } while (0)

#define CHECK_INTS(got, ...)                                                                       \
  do {                                                                                             \
    static const int32_t want_[] = {__VA_ARGS__};                                                  \
    size_t i_;                                                                                     \
    for (i_ = 0; i_ < sizeof want_ / sizeof want_[0]; ++i_) {                                      \
      if ((got)[i_] != want_[i_]) {                                                                \
        printf("%s:%d: %s[%d] is %d, not %d\n", __FILE__, __LINE__, #got, (int)i_, (int)(got)[i_], \
               (int)want_[i_]);                                                                    \
        ++failures;                                                                                \
      }                                                                                            \
    }                                                                                              \
  } while (0)

#define CHECK_FLOATS(got, ...)                                                         \
  do {                                                                                 \
    static const double want_[] = {__VA_ARGS__};                                       \
    size_t i_;                                                                         \
    for (i_ = 0; i_ < sizeof want_ / sizeof want_[0]; ++i_) {                          \
      if (!(fabs((double)(got)[i_] - want_[i_]) <= 1e-6 * (1 + fabs(want_[i_])))) {    \
        printf("%s:%d: %s[%d] is %.9g, not %.9g\n", __FILE__, __LINE__, #got, (int)i_, \
               (double)(got)[i_], want_[i_]);                                          \
        ++failures;                                                                    \
      }                                                                                \
    }                                                                                  \
  } while (0)

#endif
