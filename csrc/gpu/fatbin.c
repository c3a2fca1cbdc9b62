#include "gpu/fatbin.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The start of a fatbin, as nvcc writes it. */
typedef struct {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t size; /* of what follows the header */
} fatbin_header;

/* The start of an image in a fatbin, for one architecture. */
typedef struct {
    uint16_t kind, version;
    uint32_t header_size;
    uint64_t size; /* of what follows the header */
    uint64_t other;
    uint16_t minor, major; /* of PTX: of its instruction set */
} image_header;

enum { MOST = 1 << 28, PTX = 1 };

fst_code fst_fatbin_in_file(fst_fatbin_source *source, const char *path, fst_status *status)
{
    char *copy = strdup(path);
    if (!copy)
        return fst_fail(status, FST_NO_MEMORY, "no memory for a path");
    free(source->path);
    source->path = copy;
    return FST_OK;
}

void fst_fatbin_in_memory(fst_fatbin_source *source, const void *data, size_t size)
{
    free(source->path);
    *source = (fst_fatbin_source){.data = data, .size = size};
}

static fst_code read_file(const char *path, FILE *file, fst_fatbin *out, size_t *size,
                          fst_status *status)
{
    const long end = fseek(file, 0, SEEK_END) ? -1 : ftell(file);
    if (end < 0 || end > MOST || fseek(file, 0, SEEK_SET))
        return fst_fail(status, FST_UNSUPPORTED, "%s cannot be read", path);
    *size = (size_t)end;
    out->data = out->owned = malloc(*size + 1);
    if (!out->data)
        return fst_fail(status, FST_NO_MEMORY, "no memory for %s", path);
    if (fread(out->owned, 1, *size, file) == *size)
        return FST_OK;
    fst_fatbin_close(out);
    return fst_fail(status, FST_UNSUPPORTED, "%s cannot be read", path);
}

/* The major version of CUDA that made the images. Since CUDA 11 the instruction set of PTX has that
 * of its toolkit less four. */
static int made_by(const unsigned char *data, size_t at, size_t end)
{
    image_header image;
    int newest = 0;
    while (end - at >= sizeof image) {
        memcpy(&image, data + at, sizeof image);
        if (image.header_size < sizeof image || image.header_size > end - at ||
            image.size > end - at - image.header_size)
            break;
        if (image.kind == PTX && image.major + 4 > newest)
            newest = image.major + 4;
        at += image.header_size + image.size;
    }
    return newest;
}

fst_code fst_fatbin_open(const fst_fatbin_source *source, fst_fatbin *out, fst_status *status)
{
    const char *const name = source->path ? source->path : "the fatbin in memory";
    fatbin_header header = {0};
    size_t size = source->size;
    *out = (fst_fatbin){.data = source->data};
    if (source->path) {
        FILE *file = fopen(source->path, "rb");
        if (!file)
            return fst_fail(status, FST_UNSUPPORTED, "no CUDA kernels: %s: %s", source->path,
                            strerror(errno));
        read_file(source->path, file, out, &size, status);
        fclose(file);
        if (status->code)
            return status->code;
    }
    if (!out->data)
        return fst_fail(status, FST_UNSUPPORTED,
                        "no CUDA kernels: this package was built without nvcc or where no GPU was "
                        "seen; FASTSTEP_CUDA=1 builds them for all GPUs");
    if (size >= sizeof header)
        memcpy(&header, out->data, sizeof header);
    if (header.magic == 0xBA55ED50u && header.header_size >= sizeof header &&
        header.header_size <= size && header.size <= size - header.header_size) {
        out->cuda = made_by(out->data, header.header_size, header.header_size + header.size);
        return FST_OK;
    }
    fst_fatbin_close(out);
    return fst_fail(status, FST_UNSUPPORTED, "%s is not a whole fatbin", name);
}

void fst_fatbin_close(fst_fatbin *fatbin)
{
    free(fatbin->owned);
    *fatbin = (fst_fatbin){0};
}
