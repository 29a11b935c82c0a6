// Unguessable bytes from the operating system. Thread rules: any thread.
#pragma once

#include <cstddef>
#include <span>

#include "base/result.h"

namespace kvcore {

Status secure_random(std::span<std::byte> out);

}  // namespace kvcore
