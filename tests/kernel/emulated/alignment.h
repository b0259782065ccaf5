// What the compiler calls where a pointer is not aligned as its type asks for (-fsanitize=alignment).
#pragma once

#include "scheduler.h"

struct Place {
  const char* file;
  uint32_t line, column;
};
struct Mismatch {
  Place place;
  const void* type;
  uint8_t log_alignment, kind;
};

extern "C" void __ubsan_handle_type_mismatch_v1_abort(Mismatch* what, uintptr_t pointer) {
  fail("%s:%u: a pointer is not aligned to %d bytes: ...%03x", what->place.file, what->place.line,
       1 << what->log_alignment, static_cast<unsigned>(pointer & 0xfff));
}
