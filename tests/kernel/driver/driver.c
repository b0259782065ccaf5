// A CUDA driver without a device: it takes the calls that load and launch kernels, and writes down what they say.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_FOUND = 500, TOO_LARGE = 720, MOST_SHARED = 232448 };
typedef struct {
  unsigned gx, gy, gz, bx, by, bz, shared;
  void* stream;
  void* attributes;
  unsigned attribute_count;
} Config;

static int a_context, a_library, shared_bytes = 230000;
static struct { const char* name; int sizes[8]; } kernels[] = {
    {"decode", {24}}, {"join", {384, 8, 4, 4, 4}}, {"unpack", {8, 8, 4, 4, 4, 4}}, {"another", {0}}};

static int launched(const char* call, void* kernel, Config c, void** arguments) {
  if (c.shared > MOST_SHARED) return INVALID_VALUE;
  if (strcmp(call, "cooperative") == 0 && c.gx > 132) return TOO_LARGE;
  const int index = (int)(intptr_t)kernel - 1;
  printf("%s %s %u,%u,%u %u,%u,%u %u %ld", call, kernels[index].name, c.gx, c.gy, c.gz, c.bx, c.by, c.bz, c.shared,
         (long)(intptr_t)c.stream);
  for (const int* size = kernels[index].sizes; *size; ++size) {
    printf(" ");
    const unsigned char* bytes = *arguments++;
    for (int i = 0; i < *size; ++i) printf("%02x", bytes[i]);
  }
  return printf("\n"), SUCCESS;
}

__attribute__((constructor)) static void by_line(void) { setlinebuf(stdout); }

int cuGetErrorName(int error, const char** text) { return *text = "the driver's name of it", SUCCESS; }
int cuGetErrorString(int error, const char** text) { return *text = "the driver's words", SUCCESS; }
int cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
int cuDeviceGetCount(int* count) { return *count = 1, SUCCESS; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, SUCCESS; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { return *value = 1, SUCCESS; }
int cuCtxGetCurrent(void** context) { return *context = &a_context, SUCCESS; }
int cuCtxGetDevice(int* device) { return *device = 0, SUCCESS; }
int cuLibraryLoadData(void** library) { return *library = &a_library, SUCCESS; }
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  int index = 0;
  while (index < 3 && strcmp(kernels[index].name, name) != 0) ++index;
  *kernel = (void*)(intptr_t)(index + 1);
  return strcmp(name, "nothing") == 0 ? NOT_FOUND : SUCCESS;
}
int cuLibraryGetGlobal(uint64_t* address, size_t* size, void* library, const char* name) {
  if (library != &a_library || strcmp(name, "shared_bytes") != 0) return NOT_FOUND;
  return *address = (uintptr_t)&shared_bytes, *size = sizeof(int), SUCCESS;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t size) { return memcpy(to, (void*)from, size), SUCCESS; }
int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  return printf("attribute %d of %s: %d\n", attribute, kernels[(intptr_t)kernel - 1].name, value), SUCCESS;
}
int cuLaunchKernelEx(const Config* c, void* kernel, void** arguments) {
  return launched("ex", kernel, *c, arguments);
}
int cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** arguments) {
  return launched("plain", kernel, (Config){gx, gy, gz, bx, by, bz, shared, stream, 0, 0}, arguments);
}
int cuLaunchCooperativeKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                              unsigned bz, unsigned shared, void* stream, void** arguments) {
  return launched("cooperative", kernel, (Config){gx, gy, gz, bx, by, bz, shared, stream, 0, 0}, arguments);
}

// All other calls succeed and do nothing.
static int other(void) { return SUCCESS; }
int cuGetProcAddress_v2(const char* name, void** call, int version, uint64_t flags, int* status) {
  Dl_info here;
  dladdr((void*)cuGetProcAddress_v2, &here);
  void* library = dlopen(here.dli_fname, RTLD_NOW);
  char second[96];
  snprintf(second, sizeof second, "%s_v2", name);
  if (!(*call = dlsym(library, second)) && !(*call = dlsym(library, name))) *call = (void*)other;
  if (status) *status = 0;
  return SUCCESS;
}
