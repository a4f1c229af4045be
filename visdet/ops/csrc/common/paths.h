// Dispatch as data. An operator that has several ways to do its work lists them, the best first:
//
//   constexpr Path<Call> kPaths[] = {
//       {"encoder", encoder_declines, encoder_launch},
//       {"rows", nullptr, rows_launch},
//   };
//   run_first("ms_deform_attn", kPaths, call);
//
// `declines` looks at the call's sizes, types and device and returns null if the path serves it, else the reason as a
// clause ("it has no queries"); a null `declines` serves every call. The first path that serves a call launches it. The
// last one serves all that the operator's checks let through.
#pragma once

#include <cstddef>

namespace visdet {

template <typename Call>
struct Path {
  const char* name;
  const char* (*declines)(const Call& call);
  void (*launch)(const Call& call);
};

namespace launching {

// Whether paths of this operator other than `path` are to be skipped, as a test may ask for.
bool is_skipped(const char* op, const char* path);
// Notes a decision for a plan.
void note_declined(const char* op, const char* path, const char* reason);
void note_chosen(const char* op, const char* path);
// Raises the error that no path serves the call.
[[noreturn]] void no_path(const char* op);

}  // namespace launching

template <typename Call, size_t count>
void run_first(const char* op, const Path<Call> (&paths)[count], const Call& call) {
  for (const Path<Call>& path : paths) {
    if (launching::is_skipped(op, path.name)) continue;
    if (const char* reason = path.declines ? path.declines(call) : nullptr) {
      launching::note_declined(op, path.name, reason);
      continue;
    }
    launching::note_chosen(op, path.name);
    return path.launch(call);
  }
  launching::no_path(op);
}

}  // namespace visdet
