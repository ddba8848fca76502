# cmake --install: headers, the library, the CMake package and a pkg-config file; all relocatable.
include(CMakePackageConfigHelpers)

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/shunt")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
install(TARGETS shunt EXPORT shunt-targets)
if(TARGET shunt_cli)
  install(TARGETS shunt_cli)
endif()
install(EXPORT shunt-targets NAMESPACE shunt:: DESTINATION "${package_dir}")

configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/shuntConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/package/shuntConfig.cmake" INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/package/shuntConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/package/shuntConfig.cmake" "${PROJECT_BINARY_DIR}/package/shuntConfigVersion.cmake"
  DESTINATION "${package_dir}")

# pkg-config: paths relative to the file itself, where the folders are not absolute.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(pc_prefix "${CMAKE_INSTALL_PREFIX}")
  set(pc_libdir "${CMAKE_INSTALL_FULL_LIBDIR}")
  set(pc_includedir "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
else()
  file(RELATIVE_PATH up "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
  string(REGEX REPLACE "/$" "" up "${up}")
  set(pc_prefix "\${pcfiledir}/${up}")
  set(pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
  set(pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
set(pc_libs "")
set(pc_requires "")
if(NOT BUILD_SHARED_LIBS)
  # A static library's needs are its user's: the C++ run-time and threads, also for a C program.
  set(pc_libs " -lstdc++ -lm -pthread")
  if(NOT SHUNT_STANDALONE)
    set(pc_requires "fmt")
  endif()
  if(SHUNT_CUDA_ENABLED)
    string(APPEND pc_libs " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
  endif()
endif()
configure_file("${CMAKE_CURRENT_LIST_DIR}/shunt.pc.in" "${PROJECT_BINARY_DIR}/package/shunt.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/package/shunt.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
