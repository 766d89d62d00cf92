# Compile through ccache where it is installed, such that a clone in another folder hits the same entries.
# The launcher is `env`, not `cmake -E env`: an isolated build has another cmake path each time, and Ninja recompiles
# whatever has another command line.

find_program(PYLLAMACACHE_CCACHE ccache)
find_program(PYLLAMACACHE_ENV env)
mark_as_advanced(PYLLAMACACHE_CCACHE PYLLAMACACHE_ENV)

if(PYLLAMACACHE_CCACHE AND PYLLAMACACHE_ENV AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    # -march=native is one command line on every machine, so what it stands for goes into the key.
    set(native_file "${CMAKE_BINARY_DIR}/native-cpu.txt")
    pyllamacache_cpu_macros(native_macros -march=native)
    file(CONFIGURE OUTPUT "${native_file}" CONTENT "@native_macros@" @ONLY)

    if(NOT PYLLAMACACHE_CCACHE_BASE) # the folder that holds all sources and the build
        set(PYLLAMACACHE_CCACHE_BASE "${CMAKE_SOURCE_DIR}")
    endif()
    set(launcher "${PYLLAMACACHE_ENV}" "CCACHE_BASEDIR=${PYLLAMACACHE_CCACHE_BASE}" CCACHE_NOHASHDIR=1
        "CCACHE_EXTRAFILES=${native_file}" "${PYLLAMACACHE_CCACHE}")
    foreach(language C CXX CUDA)
        set(CMAKE_${language}_COMPILER_LAUNCHER ${launcher})
    endforeach()
    message(STATUS "pyllamacache: compiling through ${PYLLAMACACHE_CCACHE}")
endif()
