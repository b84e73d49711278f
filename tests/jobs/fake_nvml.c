/* Stands in for libnvidia-ml.so.1: as many GPUs as FAKE_GPUS names, "uuid,uuid".
   A name that begins with "x" is in exclusive mode, one that begins with "p" prohibits
   all, one that begins with "m" is cut by MIG. The interface is NVML's own:
   https://docs.nvidia.com/deploy/nvml-api/ */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char names[16][64];
static unsigned count;

int nvmlInit_v2(void)
{
    const char *given = getenv("FAKE_GPUS");
    char copy[1024];
    if (!given || !*given) return 9; /* NVML_ERROR_DRIVER_NOT_LOADED */
    snprintf(copy, sizeof copy, "%s", given);
    count = 0;
    for (char *word = strtok(copy, ","); word && count < 16; word = strtok(NULL, ","))
        snprintf(names[count++], 64, "%s", word);
    return 0;
}

int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }

int nvmlDeviceGetCount_v2(unsigned *found) { *found = count; return 0; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    if (index >= count) return 2;
    *device = names[index];
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    static char parent[64] = "GPU-parent";
    if (strncmp(uuid, "MIG-", 4)) return 2;
    *device = parent;
    return 0;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *slice, void **device)
{
    *device = slice;
    return 0;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length)
{
    const char *name = device;
    if (!strncmp(name, "GPU-", 4)) snprintf(uuid, length, "%s", name);
    else snprintf(uuid, length, "GPU-%s", name);
    return 0;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length)
{
    snprintf(name, length, "Fake");
    return device ? 0 : 2;
}

int nvmlDeviceGetComputeMode(void *device, unsigned *mode)
{
    char first = *(char *)device;
    *mode = first == 'x' ? 3 : first == 'p' ? 2 : 0;
    return 0;
}

int nvmlDeviceGetMigMode(void *device, unsigned *mode, unsigned *pending)
{
    *mode = *pending = *(char *)device == 'm';
    return 0;
}
