# Installs a build to a folder of its own, moves it, and builds this consumer against it: by
# find_package, and by pkg-config where that is installed.
#   cmake -DBUILD=... -DWORK=... -DSOURCE=... -DCXX=... -DC=... -DLIBDIR=... -P run.cmake
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT code STREQUAL "0")
    list(JOIN ARGN " " words)
    message(FATAL_ERROR "failed (${code}): ${words}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE "${WORK}")
run("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${WORK}/first")
# What was installed must not remember where.
file(RENAME "${WORK}/first" "${WORK}/moved")
set(prefix "${WORK}/moved")

run("${CMAKE_COMMAND}" -G Ninja -S "${SOURCE}" -B "${WORK}/build" -DCMAKE_BUILD_TYPE=Release
  "-DCMAKE_PREFIX_PATH=${prefix}" "-DCMAKE_CXX_COMPILER=${CXX}" "-DCMAKE_C_COMPILER=${C}")
run("${CMAKE_COMMAND}" --build "${WORK}/build")
run("${WORK}/build/consumer_cpp")
message(STATUS "find_package: ${output}")
run("${WORK}/build/consumer_c")
message(STATUS "find_package: ${output}")

run("${CMAKE_COMMAND}" -G Ninja -S "${SOURCE}/c" -B "${WORK}/build_c" -DCMAKE_BUILD_TYPE=Release
  "-DCMAKE_PREFIX_PATH=${prefix}" "-DCMAKE_C_COMPILER=${C}")
run("${CMAKE_COMMAND}" --build "${WORK}/build_c")
run("${WORK}/build_c/consumer_c")
message(STATUS "find_package from C alone: ${output}")

find_program(PKG_CONFIG NAMES pkg-config pkgconf)
if(NOT PKG_CONFIG)
  message(STATUS "pkg-config: not installed, not tried")
  return()
endif()
set(ENV{PKG_CONFIG_PATH} "${prefix}/${LIBDIR}/pkgconfig")
run("${PKG_CONFIG}" --cflags --libs shunt)
string(STRIP "${output}" flags)
separate_arguments(flags UNIX_COMMAND "${flags}")
file(MAKE_DIRECTORY "${WORK}/pkg")
run("${CXX}" -std=c++20 "${SOURCE}/main.cpp" -o "${WORK}/pkg/consumer_cpp" ${flags} "-Wl,-rpath,${prefix}/${LIBDIR}")
run("${WORK}/pkg/consumer_cpp")
message(STATUS "pkg-config: ${output}")
run("${C}" -std=c11 "${SOURCE}/main.c" -o "${WORK}/pkg/consumer_c" ${flags} "-Wl,-rpath,${prefix}/${LIBDIR}")
run("${WORK}/pkg/consumer_c")
message(STATUS "pkg-config: ${output}")
run("${PKG_CONFIG}" --modversion shunt)
string(STRIP "${output}" output)
if(NOT output STREQUAL VERSION)
  message(FATAL_ERROR "shunt.pc says version ${output}, the project is ${VERSION}")
endif()
