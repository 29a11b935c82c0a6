# kvcore_room(NAME SOURCES ... DEPENDS ...): the static library kvcore_NAME of csrc/NAME.
function(kvcore_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;DEPENDS" ${ARGN})
  add_library(kvcore_${name} STATIC ${ROOM_SOURCES})
  target_include_directories(kvcore_${name} PUBLIC ${PROJECT_SOURCE_DIR}/csrc)
  target_link_libraries(kvcore_${name} PUBLIC Threads::Threads)
  foreach(dep ${ROOM_DEPENDS})
    target_link_libraries(kvcore_${name} PUBLIC kvcore_${dep})
  endforeach()
  kvcore_options(kvcore_${name})
endfunction()

function(kvcore_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wconversion -ffp-contract=off)
  if(KVCORE_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(KVCORE_SANITIZE)
    target_compile_options(${target} PUBLIC -fsanitize=${KVCORE_SANITIZE} -fno-omit-frame-pointer
                           -fno-sanitize-recover=all -g
                           -Wno-maybe-uninitialized)  # gcc 12: false alarms in instrumented variants
    target_link_options(${target} PUBLIC -fsanitize=${KVCORE_SANITIZE})
  endif()
endfunction()

# kvcore_test(NAME SOURCES ... DEPENDS ...): one GoogleTest binary, run by ctest.
function(kvcore_test name)
  cmake_parse_arguments(T "" "" "SOURCES;DEPENDS" ${ARGN})
  add_executable(test_${name} ${T_SOURCES})
  foreach(dep ${T_DEPENDS})
    target_link_libraries(test_${name} PRIVATE kvcore_${dep})
  endforeach()
  target_link_libraries(test_${name} PRIVATE GTest::gtest_main)
  kvcore_options(test_${name})
  add_test(NAME ${name} COMMAND test_${name})
endfunction()
