/* Counts who takes the GIL: preloaded, it stands before three functions of the Python C API.
 *
 * gil_counts(buffer, size) writes one line per thread that took it: its name as the kernel knows it
 * at that moment, a tab, how often. gil_reset() forgets everything. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { kMostNames = 64 };

static struct {
  char name[16];
  long count;
} seen[kMostNames];
static int num_seen;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void count_this_thread(void) {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < num_seen && strcmp(seen[i].name, name) != 0) ++i;
  if (i == num_seen && num_seen < kMostNames) strcpy(seen[num_seen++].name, name);
  if (i < num_seen) ++seen[i].count;
  pthread_mutex_unlock(&lock);
}

void gil_reset(void) {
  pthread_mutex_lock(&lock);
  num_seen = 0;
  memset(seen, 0, sizeof seen);
  pthread_mutex_unlock(&lock);
}

void gil_counts(char* buffer, size_t size) {
  pthread_mutex_lock(&lock);
  size_t used = 0;
  buffer[0] = 0;
  for (int i = 0; i < num_seen && used < size; ++i) {
    used += (size_t)snprintf(buffer + used, size - used, "%s\t%ld\n", seen[i].name, seen[i].count);
  }
  pthread_mutex_unlock(&lock);
}

int PyGILState_Ensure(void) {
  static int (*next)(void);
  if (!next) next = (int (*)(void))dlsym(RTLD_NEXT, "PyGILState_Ensure");
  count_this_thread();
  return next();
}

void PyEval_RestoreThread(void* state) {
  static void (*next)(void*);
  if (!next) next = (void (*)(void*))dlsym(RTLD_NEXT, "PyEval_RestoreThread");
  count_this_thread();
  next(state);
}

void PyEval_AcquireThread(void* state) {
  static void (*next)(void*);
  if (!next) next = (void (*)(void*))dlsym(RTLD_NEXT, "PyEval_AcquireThread");
  count_this_thread();
  next(state);
}
