// SPDX-License-Identifier: Apache-2.0
//
// A stand-in for the part of CANN that torch_npu 2.10 and 2.13 call: host memory plays device memory.
//
// The device runs at once: a copy or kernel has had its effect on device memory when the call returns. Only what comes
// from pinned memory it fetches late, when it next does anything else with its memory. The host is kept behind: an
// asynchronous copy from or to pinned memory is "in flight" until the host has waited for it. While it is, the bytes
// that a device-to-host copy will deliver are replaced by POISON, and the source of a host-to-device copy is watched
// for changes. What the host may rely on is tracked with one vector clock per stream, so that waiting for the wrong
// stream, or for an event recorded too early, does not count.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int aclError;

// Not 207000, "feature not supported": torch_npu turns that one into a warning.
enum { OK = 0, INVALID_PARAM = 107000, NO_CONTEXT = 107002, INTERNAL_ERROR = 500000, NO_MEMORY = 207001 };
enum { MEMCPY_H2H = 0, MEMCPY_H2D = 1, MEMCPY_D2H = 2, MEMCPY_D2D = 3, MEMCPY_DEFAULT = 4, MEMCPY_INNER_D2D = 6 };
// Two different ACL enumerations: a recorded event is complete at 1, a stream and a waited event at 0.
enum { EVENT_NOT_READY = 0, EVENT_COMPLETE = 1, STREAM_COMPLETE = 0, STREAM_NOT_READY = 1, WAIT_COMPLETE = 0 };
enum { LOCATION_PINNED = 0, LOCATION_DEVICE = 1, LOCATION_PAGEABLE = 2 };

// Neither a plausible token id nor a plausible activation, in any of the dtypes in use.
#define POISON 0xFB
// Device memory nobody has written yet.
#define STALE 0xEE
#define MAX_STREAMS 512
#define MAX_DIMS 16
#define MAX_OPERANDS 64

#define COUNTERS(X) \
  X(h2d_sync) X(h2d_async) X(h2d_bytes) X(d2h_sync) X(d2h_async) X(d2h_bytes) X(d2d_sync) X(d2d_async) X(d2d_bytes) \
  X(stream_syncs) X(device_syncs) X(event_syncs) X(event_waits) X(event_records) X(memsets) \
  X(device_allocs) X(device_alloc_bytes) X(pinned_allocs) X(pinned_alloc_bytes)
#define AS_ENUM(name) C_##name,
#define AS_NAME(name) #name,
enum { COUNTERS(AS_ENUM) COUNTER_COUNT };
static const char *counter_names[] = {COUNTERS(AS_NAME)};
static uint64_t counters[COUNTER_COUNT];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ---- what went wrong: hazards are the host's, faults are calls this stand-in cannot answer --------------------
typedef struct { char **text; size_t count, room; } journal;
static journal hazards, faults;
static __thread char recent_error[512];

static void note(journal *j, const char *text) {
  if (j->count == j->room) {
    j->room = j->room ? 2 * j->room : 16;
    j->text = realloc(j->text, j->room * sizeof *j->text);
  }
  j->text[j->count++] = strdup(text);
}

__attribute__((format(printf, 1, 2))) static void hazard(const char *format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  note(&hazards, text);
}

// The error text reaches Python through torch_npu where torch_npu checks the result; the journal and stderr are
// for the places where it does not.
__attribute__((format(printf, 2, 3))) static aclError fail_locked(aclError code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(recent_error, sizeof recent_error, format, arguments);
  va_end(arguments);
  note(&faults, recent_error);
  fprintf(stderr, "emulated Ascend: %s\n", recent_error);
  return code;
}

aclError emu_unmodelled(const char *function) {
  pthread_mutex_lock(&lock);
  fail_locked(INTERNAL_ERROR, "the emulated Ascend device does not model the CANN function %s", function);
  pthread_mutex_unlock(&lock);
  return INTERNAL_ERROR;
}

const char *aclGetRecentErrMsg(void) { return recent_error; }

// ---- memory ----------------------------------------------------------------------------------------------------
typedef struct block { char *start; size_t size; int location; struct block *next; } block;
static block *blocks;

static block *block_of(const void *address) {
  for (block *b = blocks; b; b = b->next)
    if ((const char *)address >= b->start && (const char *)address < b->start + b->size) return b;
  return NULL;
}

static int location_of(const void *address) {
  block *b = block_of(address);
  return b ? b->location : LOCATION_PAGEABLE;
}

static int fits(const void *address, size_t size) {
  block *b = block_of(address);
  return !b || (size_t)(b->start + b->size - (const char *)address) >= size;
}

static aclError allocate(void **out, size_t size, int location) {
  void *start = NULL;
  size_t room = size ? size : 1;
  if (posix_memalign(&start, 512, room)) return NO_MEMORY;
  memset(start, location == LOCATION_DEVICE ? STALE : 0, room);
  block *b = malloc(sizeof *b);
  pthread_mutex_lock(&lock);
  *b = (block){start, room, location, blocks};
  blocks = b;
  counters[location == LOCATION_DEVICE ? C_device_allocs : C_pinned_allocs]++;
  counters[location == LOCATION_DEVICE ? C_device_alloc_bytes : C_pinned_alloc_bytes] += size;
  pthread_mutex_unlock(&lock);
  *out = start;
  return OK;
}

// ---- streams and events ----------------------------------------------------------------------------------------
typedef struct { int32_t id; int polled; uint64_t clock[MAX_STREAMS]; } stream;
typedef struct { int recorded, polled; uint64_t clock[MAX_STREAMS]; } event;
static stream default_stream;
static int32_t stream_count = 1;
static uint64_t issued;

static stream *stream_of(void *handle) { return handle ? handle : &default_stream; }

static void join(uint64_t *into, const uint64_t *from) {
  for (int i = 0; i < stream_count; i++)
    if (from[i] > into[i]) into[i] = from[i];
}

// ---- asynchronous copies the host has not waited for -------------------------------------------------------------
typedef struct flight {
  int to_device, settled, arrived;
  char *host, *device, *bytes;
  size_t size;
  int32_t stream;
  uint64_t number;
  struct flight *next;
} flight;
static flight *flights, **last_flight = &flights;

static size_t overlap(const char *a, size_t m, const char *b, size_t n, const char **start) {
  const char *low = a > b ? a : b, *high = a + m < b + n ? a + m : b + n;
  *start = low;
  return high > low ? (size_t)(high - low) : 0;
}

// What the device finds in host memory: the host's bytes, with the copies that are still in flight delivered.
static void read_as_device(const char *host, size_t size, char *out, uint64_t before) {
  memcpy(out, host, size);
  for (flight *f = flights; f && f->number < before; f = f->next) {
    const char *at;
    size_t n = f->to_device ? 0 : overlap(host, size, f->host, f->size, &at);
    if (n) memcpy(out + (at - host), f->bytes + (at - f->host), n);
  }
}

// Fetches what copies to the device bring. The host may have changed it by now.
static void arrive(void) {
  for (flight *f = flights; f; f = f->next) {
    if (!f->to_device || f->arrived) continue;
    f->arrived = 1;
    read_as_device(f->host, f->size, f->device, f->number);
  }
}

static int touched(const flight *f) {
  if (!f->to_device) {
    // Every copy in flight into these bytes leaves POISON there, so anything else was written by the host.
    for (size_t i = 0; i < f->size; i++)
      if ((unsigned char)f->host[i] != POISON) return 1;
    return 0;
  }
  char *now = malloc(f->size);
  read_as_device(f->host, f->size, now, f->number);
  int changed = memcmp(now, f->bytes, f->size) != 0;
  free(now);
  return changed;
}

static void inspect(flight *f) {
  if (f->settled || !touched(f)) return;
  f->settled = 1;
  hazard(f->to_device ? "copy %llu: the pinned source of a host-to-device copy of %zu bytes on stream %d was changed "
                        "before the copy was waited for"
                      : "copy %llu: the pinned destination of a device-to-host copy of %zu bytes on stream %d was "
                        "written by the host before the copy was waited for",
         (unsigned long long)f->number, f->size, f->stream);
}

static void deliver(flight *f) {
  inspect(f);
  if (f->to_device) return;
  memcpy(f->host, f->bytes, f->size);
  for (flight *later = f->next; later; later = later->next) {
    const char *at;
    size_t n = later->to_device ? 0 : overlap(f->host, f->size, later->host, later->size, &at);
    if (n) memset((char *)at, POISON, n);
  }
}

static void land(flight **link) {
  flight *f = *link;
  *link = f->next;
  if (last_flight == &f->next) last_flight = link;
  free(f->bytes);
  free(f);
}

static int covers(const uint64_t *clock, const flight *f) { return !clock || f->number <= clock[f->stream]; }

static void complete(const uint64_t *clock) {
  arrive();
  for (flight **link = &flights; *link;) {
    if (covers(clock, *link)) {
      deliver(*link);
      land(link);
    } else {
      link = &(*link)->next;
    }
  }
}

static int waiting(const uint64_t *clock) {
  for (flight *f = flights; f; f = f->next)
    if (covers(clock, f)) return 1;
  return 0;
}

// A query never blocks, so a host that asks once and goes on must not find its copies done by accident: what
// still has copies in flight answers "not ready" once, and completes them at the next question.
static int ready(const uint64_t *clock, int *polled) {
  if (waiting(clock) && !*polled) {
    *polled = 1;
    return 0;
  }
  complete(clock);
  *polled = 0;
  return 1;
}

static void launch(int to_device, char *host, char *device, size_t size, stream *s) {
  if (!to_device) arrive();
  flight *f = malloc(sizeof *f);
  *f = (flight){to_device, 0, 0, host, device, malloc(size), size, s->id, ++issued, NULL};
  s->clock[s->id] = issued;
  s->polled = 0;
  for (flight *earlier = flights; earlier; earlier = earlier->next) {
    const char *at;
    if ((to_device && earlier->to_device) || !overlap(host, size, earlier->host, earlier->size, &at)) continue;
    if (!covers(s->clock, earlier))
      hazard("copies %llu (stream %d) and %llu (stream %d) use the same pinned bytes and nothing orders them",
             (unsigned long long)earlier->number, earlier->stream, (unsigned long long)f->number, f->stream);
    // From here on the device itself overwrites the earlier copy's source, which is no fault of the host.
    if (earlier->to_device) {
      inspect(earlier);
      earlier->settled = 1;
    }
  }
  if (to_device) {
    read_as_device(host, size, f->bytes, f->number);
  } else {
    memcpy(f->bytes, device, size);
    memset(host, POISON, size);
  }
  *last_flight = f;
  last_flight = &f->next;
}

static int host_read(const char *host, size_t size) {
  for (flight *f = flights; f; f = f->next) {
    const char *at;
    if (f->to_device || !overlap(host, size, f->host, f->size, &at)) continue;
    hazard("copy %llu: the pinned destination of a device-to-host copy of %zu bytes on stream %d was read by the host "
           "before the copy was waited for", (unsigned long long)f->number, f->size, f->stream);
    return 1;
  }
  return 0;
}

// ---- for Python ------------------------------------------------------------------------------------------------
int emu_counter_count(void) { return COUNTER_COUNT; }
const char *emu_counter_name(int i) { return counter_names[i]; }

void emu_counters(uint64_t *out) {
  pthread_mutex_lock(&lock);
  memcpy(out, counters, sizeof counters);
  pthread_mutex_unlock(&lock);
}

// A source that has already changed is a hazard whether or not the host ever waits for the copy.
size_t emu_hazard_count(void) {
  pthread_mutex_lock(&lock);
  for (flight *f = flights; f; f = f->next) inspect(f);
  size_t count = hazards.count;
  pthread_mutex_unlock(&lock);
  return count;
}

const char *emu_hazard(size_t i) { return hazards.text[i]; }
size_t emu_fault_count(void) { return faults.count; }
const char *emu_fault(size_t i) { return faults.text[i]; }

size_t emu_in_flight(void) {
  size_t count = 0;
  pthread_mutex_lock(&lock);
  for (flight *f = flights; f; f = f->next) count++;
  pthread_mutex_unlock(&lock);
  return count;
}

int emu_host_read(const void *address, size_t size) {
  pthread_mutex_lock(&lock);
  int early = host_read(address, size);
  pthread_mutex_unlock(&lock);
  return early;
}

// Before Python looks at device memory.
void emu_arrive(void) {
  pthread_mutex_lock(&lock);
  arrive();
  pthread_mutex_unlock(&lock);
}

// ---- copies ----------------------------------------------------------------------------------------------------
static aclError check_copy(void *to, size_t room, const void *from, size_t size, int *kind) {
  int into = location_of(to), out_of = location_of(from);
  int actual = into == LOCATION_DEVICE ? (out_of == LOCATION_DEVICE ? MEMCPY_D2D : MEMCPY_H2D)
                                       : (out_of == LOCATION_DEVICE ? MEMCPY_D2H : MEMCPY_H2H);
  if (*kind == MEMCPY_DEFAULT) *kind = actual;
  if (*kind == MEMCPY_INNER_D2D) *kind = MEMCPY_D2D;
  if (*kind != actual)
    return fail_locked(INVALID_PARAM, "a copy of kind %d was asked for, but the addresses make it kind %d", *kind, actual);
  if (size > room || !fits(to, size) || !fits(from, size))
    return fail_locked(INVALID_PARAM, "a copy of %zu bytes leaves the memory block it was given", size);
  return OK;
}

static void count_copy(int kind, int asynchronous, size_t size) {
  static const int counter[][3] = {[MEMCPY_H2D] = {C_h2d_sync, C_h2d_async, C_h2d_bytes},
                                   [MEMCPY_D2H] = {C_d2h_sync, C_d2h_async, C_d2h_bytes},
                                   [MEMCPY_D2D] = {C_d2d_sync, C_d2d_async, C_d2d_bytes}};
  if (kind == MEMCPY_H2H) return;
  counters[counter[kind][asynchronous]]++;
  counters[counter[kind][2]] += size;
}

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
  pthread_mutex_lock(&lock);
  aclError result = check_copy(to, room, from, size, &kind);
  if (!result) {
    count_copy(kind, 0, size);
    arrive();
    if (kind == MEMCPY_H2D) host_read(from, size);
    memmove(to, from, size);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *handle) {
  pthread_mutex_lock(&lock);
  aclError result = check_copy(to, room, from, size, &kind);
  if (!result) {
    count_copy(kind, 1, size);
    // With pageable memory the call returns when the copy is done: nothing stays in flight.
    if (kind == MEMCPY_H2D && location_of(from) == LOCATION_PINNED) launch(1, (char *)from, to, size, stream_of(handle));
    else if (kind == MEMCPY_D2H && location_of(to) == LOCATION_PINNED) launch(0, to, (char *)from, size, stream_of(handle));
    else {
      arrive();
      memmove(to, from, size);
    }
  }
  pthread_mutex_unlock(&lock);
  return result;
}

aclError aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t size, int kind, void *handle) {
  return aclrtMemcpyAsync(to, room, from, size, kind, handle);
}

aclError aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
  aclError result = OK;
  pthread_mutex_lock(&lock);
  if (size > room || !fits(to, size))
    result = fail_locked(INVALID_PARAM, "a fill of %zu bytes leaves the memory block it was given", size);
  else {
    counters[C_memsets]++;
    arrive();
    memset(to, value, size);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, void *handle) {
  (void)handle;
  return aclrtMemset(to, room, value, size);
}

static aclError release(void *address, int location) {
  aclError result = OK;
  pthread_mutex_lock(&lock);
  block **link = &blocks;
  while (*link && (*link)->start != address) link = &(*link)->next;
  if (!*link || (*link)->location != location) {
    result = fail_locked(INVALID_PARAM, "memory was freed that was not allocated this way");
  } else {
    block *b = *link;
    *link = b->next;
    arrive();
    for (flight **f = &flights; *f;) {
      const char *at;
      if (!overlap(b->start, b->size, (*f)->host, (*f)->size, &at)) {
        f = &(*f)->next;
        continue;
      }
      hazard("copy %llu: its pinned memory was freed before the copy was waited for", (unsigned long long)(*f)->number);
      land(f);
    }
    free(b->start);
    free(b);
  }
  pthread_mutex_unlock(&lock);
  return result;
}

aclError aclrtMalloc(void **out, size_t size, int policy) { (void)policy; return allocate(out, size, LOCATION_DEVICE); }
aclError aclrtMallocAlign32(void **out, size_t size, int policy) { return aclrtMalloc(out, size, policy); }
aclError aclrtMallocHost(void **out, size_t size) { return allocate(out, size, LOCATION_PINNED); }
aclError aclrtMallocHostWithCfg(void **out, uint64_t size, void *config) {
  (void)config;
  return allocate(out, size, LOCATION_PINNED);
}
aclError aclrtFree(void *address) { return release(address, LOCATION_DEVICE); }
aclError aclrtFreeHost(void *address) { return release(address, LOCATION_PINNED); }

// The structure is {location id, location type, page size, reserved}: 32-bit words in this order.
aclError aclrtPointerGetAttributes(const void *address, uint32_t *attributes) {
  pthread_mutex_lock(&lock);
  memset(attributes, 0, 7 * sizeof *attributes);
  attributes[1] = (uint32_t)location_of(address);
  attributes[2] = 4096;
  pthread_mutex_unlock(&lock);
  return OK;
}

aclError aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total) {
  (void)kind;
  *free_bytes = *total = (size_t)64 << 30;
  return OK;
}

// ---- streams ---------------------------------------------------------------------------------------------------
aclError aclrtCreateStream(void **out) {
  aclError result = OK;
  pthread_mutex_lock(&lock);
  if (stream_count == MAX_STREAMS) {
    result = fail_locked(NO_MEMORY, "more than %d streams were created", MAX_STREAMS - 1);
  } else {
    stream *s = calloc(1, sizeof *s);
    s->id = stream_count++;
    *out = s;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

aclError aclrtCreateStreamWithConfig(void **out, uint32_t priority, uint32_t flags) {
  (void)priority;
  (void)flags;
  return aclrtCreateStream(out);
}

static aclError synchronize(void *handle) {
  pthread_mutex_lock(&lock);
  counters[C_stream_syncs]++;
  complete(stream_of(handle)->clock);
  pthread_mutex_unlock(&lock);
  return OK;
}

aclError aclrtSynchronizeStream(void *handle) { return synchronize(handle); }
aclError aclrtSynchronizeStreamWithTimeout(void *handle, int32_t timeout) { (void)timeout; return synchronize(handle); }

aclError aclrtSynchronizeDevice(void) {
  pthread_mutex_lock(&lock);
  counters[C_device_syncs]++;
  complete(NULL);
  pthread_mutex_unlock(&lock);
  return OK;
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { (void)timeout; return aclrtSynchronizeDevice(); }

aclError aclrtDestroyStream(void *handle) {
  pthread_mutex_lock(&lock);
  complete(stream_of(handle)->clock);
  if (handle) free(handle);
  pthread_mutex_unlock(&lock);
  return OK;
}
aclError aclrtDestroyStreamForce(void *handle) { return aclrtDestroyStream(handle); }

aclError aclrtStreamQuery(void *handle, int *status) {
  pthread_mutex_lock(&lock);
  stream *s = stream_of(handle);
  *status = ready(s->clock, &s->polled) ? STREAM_COMPLETE : STREAM_NOT_READY;
  pthread_mutex_unlock(&lock);
  return OK;
}

aclError aclrtStreamGetId(void *handle, int32_t *id) { *id = stream_of(handle)->id; return OK; }

// ---- events ----------------------------------------------------------------------------------------------------
aclError aclrtCreateEventExWithFlag(void **out, uint32_t flag) { (void)flag; *out = calloc(1, sizeof(event)); return OK; }
aclError aclrtCreateEventWithFlag(void **out, uint32_t flag) { return aclrtCreateEventExWithFlag(out, flag); }
aclError aclrtDestroyEvent(void *handle) { free(handle); return OK; }

aclError aclrtRecordEvent(void *handle, void *on) {
  event *e = handle;
  pthread_mutex_lock(&lock);
  counters[C_event_records]++;
  e->recorded = 1;
  e->polled = 0;
  memcpy(e->clock, stream_of(on)->clock, sizeof e->clock);
  pthread_mutex_unlock(&lock);
  return OK;
}

aclError aclrtResetEvent(void *handle, void *on) {
  (void)on;
  event *e = handle;
  pthread_mutex_lock(&lock);
  *e = (event){0};
  pthread_mutex_unlock(&lock);
  return OK;
}

aclError aclrtStreamWaitEvent(void *on, void *handle) {
  event *e = handle;
  pthread_mutex_lock(&lock);
  counters[C_event_waits]++;
  join(stream_of(on)->clock, e->clock);
  pthread_mutex_unlock(&lock);
  return OK;
}

aclError aclrtSynchronizeEvent(void *handle) {
  event *e = handle;
  pthread_mutex_lock(&lock);
  counters[C_event_syncs]++;
  complete(e->clock);
  pthread_mutex_unlock(&lock);
  return OK;
}

aclError aclrtQueryEventStatus(void *handle, int *status) {
  event *e = handle;
  pthread_mutex_lock(&lock);
  *status = ready(e->clock, &e->polled) ? EVENT_COMPLETE : EVENT_NOT_READY;
  pthread_mutex_unlock(&lock);
  return OK;
}
aclError aclQueryEventRecordedStatus(void *handle, int *status) { return aclrtQueryEventStatus(handle, status); }

// ---- kernels ---------------------------------------------------------------------------------------------------
typedef struct { int32_t dtype, rank; int64_t shape[MAX_DIMS]; } descriptor;
typedef struct { void *data; size_t size; } buffer;
typedef struct { void *data; size_t size; int32_t dtype, rank; int64_t shape[MAX_DIMS]; } operand;
enum { DONE = 0, NO_KERNEL = 1, REFUSED = 2 };
typedef int (*kernel_runner)(const char *name, int inputs, const operand *in, int outputs, const operand *out,
                             char *why, size_t room);
static kernel_runner run_kernel;

void emu_set_kernel_runner(kernel_runner runner) { run_kernel = runner; }

void *aclCreateTensorDesc(int dtype, int rank, const int64_t *shape, int format) {
  (void)format;
  if (rank > MAX_DIMS) return NULL;
  descriptor *d = calloc(1, sizeof *d);
  d->dtype = dtype;
  d->rank = rank;
  if (rank > 0) memcpy(d->shape, shape, (size_t)rank * sizeof *shape);
  return d;
}
void aclDestroyTensorDesc(const void *d) { free((void *)d); }
void *aclCreateDataBuffer(void *data, size_t size) {
  buffer *b = malloc(sizeof *b);
  *b = (buffer){data, size};
  return b;
}
aclError aclDestroyDataBuffer(const void *b) { free((void *)b); return OK; }

static operand operand_of(const descriptor *d, const buffer *b) {
  operand o = {b ? b->data : NULL, b ? b->size : 0, d->dtype, d->rank, {0}};
  memcpy(o.shape, d->shape, sizeof o.shape);
  return o;
}

static aclError execute(const char *name, int inputs, descriptor **in_desc, buffer **in, int outputs,
                        descriptor **out_desc, buffer **out) {
  static __thread operand operands[2 * MAX_OPERANDS];
  int usable = run_kernel && inputs <= MAX_OPERANDS && outputs <= MAX_OPERANDS;
  for (int i = 0; usable && i < inputs; i++) operands[i] = operand_of(in_desc[i], in[i]);
  for (int i = 0; usable && i < outputs; i++) operands[MAX_OPERANDS + i] = operand_of(out_desc[i], out[i]);
  emu_arrive();
  // Unlocked: the runner is Python and may come back here.
  int result = usable ? run_kernel(name, inputs, operands, outputs, operands + MAX_OPERANDS, recent_error,
                                   sizeof recent_error)
                      : NO_KERNEL;
  if (result == DONE) return OK;
  // A kernel that refuses its operands, shapes for example, has answered. torch_npu raises its text, and that is all:
  // a fault would be raised again, in whatever the host does next.
  if (result == REFUSED) return INTERNAL_ERROR;
  pthread_mutex_lock(&lock);
  fail_locked(INTERNAL_ERROR, "the emulated Ascend device has no kernel for the CANN operator %s", name);
  pthread_mutex_unlock(&lock);
  return INTERNAL_ERROR;
}

aclError aclopCompileAndExecute(const char *name, int inputs, descriptor **in_desc, buffer **in, int outputs,
                                descriptor **out_desc, buffer **out, const void *attributes, int engine, int mode,
                                const char *path, void *on) {
  (void)attributes; (void)engine; (void)mode; (void)path; (void)on;
  return execute(name, inputs, in_desc, in, outputs, out_desc, out);
}
aclError aclopCompileAndExecuteV2(const char *name, int inputs, descriptor **in_desc, buffer **in, int outputs,
                                  descriptor **out_desc, buffer **out, void *attributes, int engine, int mode,
                                  const char *path, void *on) {
  return aclopCompileAndExecute(name, inputs, in_desc, in, outputs, out_desc, out, attributes, engine, mode, path, on);
}
