/* The CUDA calls that a CuTe DSL host function makes, for a machine without a driver.
 *
 * The DSL resolves these symbols from the library that CUTE_DSL_LIBS names, so a kernel's own host code runs unmodified: it computes the
 * grid, builds tensor maps and packs parameters. A launch goes to the callback that Python sets.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned x, y, z; } Dim3;
typedef struct { int id, pad; union { char raw[64]; Dim3 dim; int value; } v; } Attribute;
typedef struct { Dim3 grid, block; size_t shared; void *stream; Attribute *attributes; unsigned n_attributes; } Config;
typedef int (*OnLaunch)(const char *, const Dim3 *, const Dim3 *, const Dim3 *, size_t, void **);

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3 };
enum { ATTRIBUTE_CLUSTER = 4, DEVICE_SMS = 16, DEVICE_SHARED_OPTIN = 97 };

static OnLaunch on_launch;
static int sms = 132;
void ptxemu_set_launch(OnLaunch f) { on_launch = f; }
void ptxemu_set_sms(int n) { sms = n; }

int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f)
{
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    *library = (void *)code;
    return SUCCESS;
}

int _cudaLibraryUnload(void *library) { return (void)library, SUCCESS; }

/* A kernel's handle is its name. */
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name)
{
    (void)library;
    return (*kernel = strdup(name)) ? SUCCESS : INVALID_VALUE;
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device)
{
    (void)attribute, (void)kernel, (void)device;
    return *value = 0, SUCCESS;
}

int _cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    *value = attribute == DEVICE_SHARED_OPTIN ? 232448 : attribute == DEVICE_SMS ? sms : 1;
    return SUCCESS;
}

int _cudaFuncSetAttribute(void *f, int attribute, int value) { return (void)f, (void)attribute, (void)value, SUCCESS; }
int _cudaKernelSetAttributeForDevice(void *f, int attribute, int value, int d) { return (void)f, (void)attribute, (void)value, (void)d, SUCCESS; }
int _cudaGetDevice(int *device) { return *device = 0, SUCCESS; }
int _cudaSetDevice(int device) { return (void)device, SUCCESS; }
int _cudaGetDeviceCount(int *count) { return *count = 1, SUCCESS; }
int _cuDeviceGet(int *device, int ordinal) { return *device = ordinal, SUCCESS; }

int _cudaLaunchKernelEx(const Config *c, const void *kernel, void **arguments)
{
    Dim3 cluster = {1, 1, 1};
    for (unsigned i = 0; i < c->n_attributes; i++)
        if (c->attributes[i].id == ATTRIBUTE_CLUSTER)
            cluster = c->attributes[i].v.dim;
    return on_launch ? on_launch(kernel, &c->grid, &c->block, &cluster, c->shared, arguments) : NOT_INITIALIZED;
}

/* A tensor map as the DSL's own host code writes one: only the first 64 of 128 bytes carry data.
 *   words 0-1 address; 2: bits 0-3 kind, 4-6 rank - 1, 7-10 type, 11-12 interleave, 13-14 swizzle, 15 NaN fill, 16 tf32,
 *   17-18 L2 promotion, 19-20 swizzle atomicity; 3-6 strides / 16, their high bits in 7, four each; 8-12 sizes - 1;
 *   13: bits 0-2 element strides - 1 of dimension 0, ..., 24-31 box - 1 of dimension 0.
 * Returns whether everything is in its range. */
enum { TILED = 2, IM2COL = 3 };
static int map_head(uint32_t *w, int kind, int type, unsigned rank, const void *base, const uint64_t *size, const uint64_t *stride, uint32_t box0,
                    const uint32_t *element_stride, int interleave, int swizzle, int l2, int nan_fill)
{
    static const uint8_t code[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 7, 8};
    if (rank < 1 || rank > 5 || ((uint64_t)base & 15) || type < 0 || type > 12 || swizzle < 0 || swizzle > 6 || l2 < 0 || l2 > 3 || interleave ||
        box0 == 0 || box0 > 256)
        return 0;
    memset(w, 0, 128);
    memcpy(w, &base, 8);
    w[2] = (uint32_t)kind | (rank - 1) << 4 | (uint32_t)code[type] << 7 | (uint32_t)(swizzle > 3 ? 3 : swizzle) << 13 |
           (type >= 11 ? 1u << 16 : 0) | (nan_fill ? 1u << 15 : 0) | (uint32_t)l2 << 17 | (uint32_t)(swizzle > 3 ? swizzle - 3 : 0) << 19;
    w[13] = (box0 - 1) << 24;
    for (unsigned i = 0; i < rank; i++) {
        if (size[i] == 0 || size[i] > 1ull << 32 || element_stride[i] < 1 || element_stride[i] > 8)
            return 0;
        w[8 + i] = (uint32_t)(size[i] - 1);
        w[13] |= (element_stride[i] - 1) << 3 * i;
    }
    for (unsigned i = 0; i + 1 < rank; i++) {
        if (stride[i] & 15 || stride[i] >> 40)
            return 0;
        w[3 + i] = (uint32_t)(stride[i] >> 4);
        w[7] |= (uint32_t)(stride[i] >> 36) << 4 * i;
    }
    return 1;
}

/* Word 14: box - 1 of dimensions 1 to 4. */
int _cuTensorMapEncodeTiled(void *out, int type, unsigned rank, void *base, const uint64_t *size, const uint64_t *stride,
                            const uint32_t *box, const uint32_t *element_stride, int interleave, int swizzle, int l2, int nan_fill)
{
    uint32_t w[32];
    if (!map_head(w, TILED, type, rank, base, size, stride, box[0], element_stride, interleave, swizzle, l2, nan_fill))
        return INVALID_VALUE;
    for (unsigned i = 1; i < rank; i++) {
        if (box[i] == 0 || box[i] > 256)
            return INVALID_VALUE;
        w[14] |= (box[i] - 1) << 8 * (i - 1);
    }
    memcpy(out, w, sizeof w);
    return SUCCESS;
}

/* Word 14: the lower corners in the low half, the upper in the high half, 16, 8 or 5 bits each; 15: pixels - 1. */
int _cuTensorMapEncodeIm2col(void *out, int type, unsigned rank, void *base, const uint64_t *size, const uint64_t *stride, const int *lower,
                             const int *upper, uint32_t channels, uint32_t pixels, const uint32_t *element_stride, int interleave, int swizzle,
                             int l2, int nan_fill)
{
    static const uint8_t width[] = {16, 8, 5};
    uint32_t w[32];
    if (rank < 3 || pixels < 1 || pixels > 1024 ||
        !map_head(w, IM2COL, type, rank, base, size, stride, channels, element_stride, interleave, swizzle, l2, nan_fill))
        return INVALID_VALUE;
    const int bits = width[rank - 3], most = 1 << (bits - 1);
    for (unsigned i = 0; i + 2 < rank; i++) {
        if (lower[i] < -most || lower[i] >= most || upper[i] < -most || upper[i] >= most)
            return INVALID_VALUE;
        w[14] |= ((uint32_t)lower[i] & ((1u << bits) - 1)) << bits * i;
        w[14] |= ((uint32_t)upper[i] & ((1u << bits) - 1)) << (16 + bits * i);
    }
    w[15] = pixels - 1;
    memcpy(out, w, sizeof w);
    return SUCCESS;
}

/* mode: 0 for im2col::w, 1 for im2col::w::128, one more in bits 16-17 of word 15. */
int _cuTensorMapEncodeIm2colWide(void *out, int type, unsigned rank, void *base, const uint64_t *size, const uint64_t *stride, int lower, int upper,
                                 uint32_t channels, uint32_t pixels, const uint32_t *element_stride, int interleave, int mode, int swizzle, int l2,
                                 int nan_fill)
{
    uint32_t w[32];
    if (rank < 3 || pixels < 1 || pixels > 1024 || lower != (int16_t)lower || upper != (int16_t)upper || mode < 0 || mode > 1 ||
        !map_head(w, IM2COL, type, rank, base, size, stride, channels, element_stride, interleave, swizzle, l2, nan_fill))
        return INVALID_VALUE;
    w[14] = (uint16_t)lower | (uint32_t)(uint16_t)upper << 16;
    w[15] = (pixels - 1) | (uint32_t)(mode + 1) << 16;
    memcpy(out, w, sizeof w);
    return SUCCESS;
}

int cuda_dialect_init_library_once(void **library, int (*init)(void **), int (*load)(void **, int), void *error)
{
    (void)error;
    if (*library)
        return SUCCESS;
    void *l = 0;
    int rc = init(&l);
    if (!rc && load)
        rc = load(&l, 0);
    if (!rc)
        *library = l;
    return rc;
}

int cuda_dialect_unload_library_once(void **library)
{
    if (library)
        *library = 0;
    return SUCCESS;
}
