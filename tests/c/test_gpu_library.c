/* How the driver is found: installed late, older than the kernels, with files that are no kernels,
 * and after a fork. Each part has a process of its own. */
#include <dlfcn.h>

#include "base/device.h"
#include "common.h"
#include "gpu_empty.h"
#include "gpu/launch.h"
#include "gpu_child.h"

static fst_status status;

/* The fake library is not linked with this program. */
static void (*machine)(int devices, int capability, int version);
static void (*use)(const fake_cuda_kernel *kernels, size_t count);
static long (*calls)(const char *call);

static void load(const char *path, size_t kernel_count)
{
    void *library = dlopen(path, RTLD_NOW);
    if (!CHECK(library != NULL)) {
        fprintf(stderr, "    %s\n", dlerror());
        exit(1);
    }
    *(void **)&machine = dlsym(library, "fake_cuda_machine");
    *(void **)&use = dlsym(library, "fake_cuda_use");
    *(void **)&calls = dlsym(library, "fake_cuda_calls");
    CHECK_INT(calls(NULL), 0);
    use(kernels, kernel_count);
    fst_gpu_kernels_in_memory(fatbin, sizeof fatbin);
}

/* The first use fails with this text, and so does the next one. */
static void refuses(fst_code code, const char *text)
{
    for (int i = 0; i < 2; i++) {
        status = (fst_status){0};
        CHECK(!fst_gpu_tables_new(0, &status));
        CHECK_INT(status.code, code);
        CHECK_CONTAINS(status.message, text);
    }
    status = (fst_status){0};
}

static void works(void)
{
    status = (fst_status){0};
    const fst_loss_scale_launch launch = {.scale = 0};
    fst_gpu_tables *tables = fst_gpu_tables_new(0, &status);
    CHECK(tables != NULL);
    CHECK_INT(fst_gpu_loss_scale(0, &launch, NULL, &status), FST_OK);
    fst_gpu_tables_free(tables);
}

static void no_driver(void *argument)
{
    (void)argument;
    fst_gpu_kernels_in_memory(fatbin, sizeof fatbin);
    refuses(FST_UNSUPPORTED, "no NVIDIA driver: libcuda.so.1");
    load(FAKE_CUDA, KERNELS); /* installed meanwhile */
    works();
}

/* A fatbin with machine code and PTX of CUDA 13, and others that are not right. */
static void driver_older_than_the_kernels(void *argument)
{
    uint32_t made[4 + 8 + 8 + 1] = {0xBA55ED50, 1 | 16 << 16, 68};
    uint32_t *code = made + 4, *ptx = code + 8;
    (void)argument;
    load(FAKE_CUDA, KERNELS);
    code[0] = 2, code[1] = 32, code[6] = 8 | 1 << 16;
    ptx[0] = 1, ptx[1] = 32, ptx[2] = 4, ptx[6] = 0 | 9 << 16;
    fst_gpu_kernels_in_memory(made, sizeof made);
    machine(1, 90, 12090);
    refuses(FST_UNSUPPORTED, "need a driver for CUDA 13 or later, and the driver of this machine "
                             "is for CUDA 12.9; update it");
    status = (fst_status){0};
    CHECK_INT(fst_gpu_check_driver(&status), FST_UNSUPPORTED);
    CHECK_CONTAINS(status.message, "for CUDA 12.9; update it");
    machine(1, 90, 13000);
    status = (fst_status){0};
    CHECK_INT(fst_gpu_check_driver(&status), FST_OK);
    machine(1, 90, 12090);
    ptx[6] = 1 | 8 << 16; /* made by CUDA 12, and so the driver is asked */
    refuses(FST_DEVICE_FAILED, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION");
    ptx[6] = 0 | 9 << 16;
    code[2] = 68; /* longer than the fatbin: nothing behind it is read */
    refuses(FST_DEVICE_FAILED, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION");
    code[2] = 0;
    machine(1, 90, 13000);
    works();
}

static void kernels_that_are_missing(void *argument)
{
    (void)argument;
    load(FAKE_CUDA, 5);
    refuses(FST_DEVICE_FAILED,
            "cuModuleGetFunction of fst_clamp on CUDA device 0: CUDA_ERROR_NOT_FOUND");
    use(kernels, KERNELS);
    works();
}

/* Files that are no fatbin, and one that is. */
static void files(void *argument)
{
    static const char *const text = "this is a text and no fatbin at all";
    unsigned char later[sizeof fatbin];
    char path[] = FAKE_CUDA ".XXXXXX";
    const int file = mkstemp(path);
    (void)argument;
    load(FAKE_CUDA, KERNELS);
    fst_gpu_kernels_in_memory(NULL, 0);
    refuses(FST_UNSUPPORTED, "FASTSTEP_CUDA=1 builds them");
    fst_gpu_kernels_in_memory(fatbin, sizeof fatbin - 1);
    refuses(FST_UNSUPPORTED, "is not a whole fatbin");
    CHECK_INT(fst_gpu_kernels_in_file("/no/such/file", &status), FST_OK);
    refuses(FST_UNSUPPORTED, "no CUDA kernels: /no/such/file: No such file");
    CHECK_INT(fst_gpu_kernels_in_file("/", &status), FST_OK);
    refuses(FST_UNSUPPORTED, "/ cannot be read");
    CHECK_INT(fst_gpu_kernels_in_file(path, &status), FST_OK);
    refuses(FST_UNSUPPORTED, "is not a whole fatbin"); /* empty */
    CHECK(write(file, text, strlen(text)) > 0);
    refuses(FST_UNSUPPORTED, "is not a whole fatbin");
    memcpy(later, fatbin, sizeof later);
    later[8] = 9; /* one byte more than there is */
    CHECK(pwrite(file, later, sizeof later, 0) > 0 && !ftruncate(file, sizeof later));
    refuses(FST_UNSUPPORTED, "is not a whole fatbin");
    CHECK(pwrite(file, fatbin, sizeof fatbin, 0) > 0);
    works();
    fst_gpu_kernels_in_memory(NULL, 0); /* the path is freed */
    unlink(path);
    close(file);
}

static void child_of_a_user(void *argument)
{
    const fst_loss_scale_launch launch = {.scale = 0};
    const long before = calls(NULL);
    refuses(FST_UNSUPPORTED, "before this process was forked");
    CHECK_INT(fst_gpu_loss_scale(0, &launch, NULL, &status), FST_UNSUPPORTED);
    status = (fst_status){0};
    fst_work none = {.width = 1};
    CHECK_INT(fst_gpu_tables_set(argument, &none, NULL, NULL, &status), FST_UNSUPPORTED);
    status = (fst_status){0};
    CHECK_INT(fst_gpu_tables_set_brief(argument, &none, NULL, &status), FST_UNSUPPORTED);
    fst_gpu_tables_free(argument);
    CHECK_INT(calls(NULL), before); /* the driver was not called */
}

static void child_before_use(void *argument)
{
    (void)argument;
    works();
}

static void forks(void *argument)
{
    (void)argument;
    load(FAKE_CUDA, KERNELS);
    in_child(child_before_use, NULL, "a child of a process that has not used CUDA");
    fst_gpu_tables *tables = fst_gpu_tables_new(0, &status);
    if (!CHECK(tables != NULL))
        return;
    fst_work none = {.width = 1};
    CHECK_INT(fst_gpu_tables_set(tables, &none, NULL, NULL, &status), FST_OK);
    in_child(child_of_a_user, tables, "a child of a process that has");
    works();
    fst_gpu_tables_free(tables);
}

int main(void)
{
    void *real = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!real) /* else this machine has a driver of its own */
        in_child(no_driver, NULL, "no driver");
    else
        dlclose(real);
    in_child(driver_older_than_the_kernels, NULL, "a driver older than the kernels");
    in_child(kernels_that_are_missing, NULL, "kernels that are missing");
    in_child(files, NULL, "files");
    in_child(forks, NULL, "forks");
    return check_report();
}
