# The warnings of our own sources; a private interface, so that they bind nobody else.
add_library(shunt_warnings INTERFACE)

set(cxx -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wcast-align -Wformat=2
  -Wextra-semi -Wimplicit-fallthrough
  # Specs are written with designated initialisers that leave the defaults alone.
  -Wno-missing-field-initializers)
set(c -Wall -Wextra -Wpedantic -Wshadow -Wcast-align -Wformat=2 -Wstrict-prototypes -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND cxx -Wdouble-promotion)  # clang warns of double{x} too
endif()
if(SHUNT_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # g++ 12 sees uninitialised reads in instrumented standard headers.
  list(APPEND cxx -Wno-maybe-uninitialized)
endif()
if(SHUNT_WERROR)
  list(APPEND cxx -Werror)
  list(APPEND c -Werror)
endif()

target_compile_options(shunt_warnings INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${cxx}>"
  "$<$<COMPILE_LANGUAGE:C>:${c}>")
