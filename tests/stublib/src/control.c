/* The log of calls, the faults asked for, the counters and the log callback. */
#define _GNU_SOURCE
#include "stub.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_RULES = 64, MAX_COUNTERS = 256 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char *calls;
static size_t n_calls, calls_room;
static struct rule rules[MAX_RULES];
static int n_rules;
static bool env_read;
static struct { char name[48]; int64_t n; } counters[MAX_COUNTERS];
static int n_counters;
static int n_hanging, max_inside;
static bool released;
static log_callback logger;
static void *logger_data;

static int64_t *counter(const char *name) {
    for (int i = 0; i < n_counters; i++)
        if (!strcmp(counters[i].name, name)) return &counters[i].n;
    if (n_counters == MAX_COUNTERS) return &counters[MAX_COUNTERS - 1].n;
    snprintf(counters[n_counters].name, sizeof counters[0].name, "%s", name);
    counters[n_counters].n = 0;
    return &counters[n_counters++].n;
}

static void append(const char *line) {
    size_t n = strlen(line);
    if (n_calls + n + 2 > calls_room) {
        calls_room = 2 * (n_calls + n + 2);
        calls = realloc(calls, calls_room);
    }
    memcpy(calls + n_calls, line, n);
    n_calls += n;
    calls[n_calls++] = '\n';
    calls[n_calls] = 0;
    /* a process that is about to die cannot be asked: STUB_CALLS names a file that outlives it */
    const char *path = getenv("STUB_CALLS");
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    if (fd >= 0) {
        dprintf(fd, "%d %s\n", (int) getpid(), line);
        close(fd);
    }
}

static void note(const char *prefix, const char *format, va_list args) {
    char line[2048], word[48];
    int n = snprintf(line, sizeof line, "%s", prefix);
    vsnprintf(line + n, sizeof line - (size_t) n, format, args);
    snprintf(word, sizeof word, "%.*s", (int) strcspn(line, " "), line);
    pthread_mutex_lock(&lock);
    append(line);
    ++*counter(word);
    pthread_mutex_unlock(&lock);
}

void stub_note(const char *format, ...) {
    va_list args;
    va_start(args, format);
    note("", format, args);
    va_end(args);
}

void stub_mistake(const char *format, ...) {
    va_list args;
    va_start(args, format);
    note("MISTAKE ", format, args);
    va_end(args);
}

void stub_tally(const char *name) {
    pthread_mutex_lock(&lock);
    ++*counter(name);
    pthread_mutex_unlock(&lock);
}

void stub_say(int level, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    log_callback to = logger;
    if (to) to(level, text, logger_data);
    else fputs(text, stderr);
}

/* ---- faults: items `call:action[=value][:mode][@n[+]]`, separated by blanks, commas or semicolons ----
 *
 * They come from STUB_FAULTS, from stub_control, and from the file that STUB_FAULTS_FILE names, which may be put there,
 * replaced or taken away at any time. Turns (@n) of a file's items are counted by each process from its first look at
 * the file. An item of a file that fires leaves `FILE.ITEM` beside it; one with @n and no + fires in one process only,
 * so that a worker that starts after the one that died of it is spared.
 */

static int mode_of(const char *name) {
    for (int mode = 0; mode < N_MODES; mode++)
        if (!strcmp(name, stub_mode_name(mode))) return mode;
    return -2;
}

const char *stub_mode_name(int mode) {
    static const char *const names[N_MODES] = {"none", "layer", "row", "tensor"};
    return mode >= 0 && mode < N_MODES ? names[mode] : "unknown";
}

static bool add_rule(char *item, bool from_file) {
    struct rule rule = {.mode = MODE_ANY, .from_file = from_file};
    snprintf(rule.text, sizeof rule.text, "%s", item);
    if (!strcmp(item, "clear")) {
        n_rules = 0;
        return true;
    }
    char *at = strrchr(item, '@');
    if (at) {
        char *end;
        *at = 0;
        rule.from = strtol(at + 1, &end, 10);
        rule.onward = *end == '+';
        if (rule.from < 1 || end[rule.onward]) return false;
    }
    char *action = strchr(item, ':'), *mode = action ? strchr(action + 1, ':') : NULL;
    if (!action || n_rules == MAX_RULES) return false;
    *action++ = 0;
    if (mode) {
        *mode++ = 0;
        rule.mode = mode_of(mode);
        if (rule.mode == -2) return false;
    }
    char *value = strchr(action, '=');
    if (value) {
        *value++ = 0;
        rule.value = strtoll(value, NULL, 0);
    }
    snprintf(rule.call, sizeof rule.call, "%s", item);
    snprintf(rule.action, sizeof rule.action, "%s", action);
    rules[n_rules++] = rule;
    return true;
}

static bool add_rules(const char *text, bool from_file) {
    char *copy = strdup(text), *rest = copy, *item;
    bool good = true;
    while ((item = strsep(&rest, " ,;\n\t")))
        if (*item) good = add_rule(item, from_file) && good;
    free(copy);
    return good;
}

static void take_rules(const char *origin, const char *text, bool from_file) {
    if (add_rules(text, from_file)) return;
    fprintf(stderr, "stub: %s not understood: %s\n", origin, text);
    abort();
}

static void read_file(void) {
    static struct stat last;
    const char *path = getenv("STUB_FAULTS_FILE");
    struct stat now = {0};
    if (!path || (stat(path, &now) && errno != ENOENT)) return;
    if (now.st_ino == last.st_ino && now.st_mtim.tv_sec == last.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == last.st_mtim.tv_nsec) return;
    last = now;
    int kept = 0;
    for (int i = 0; i < n_rules; i++)
        if (!rules[i].from_file) rules[kept++] = rules[i];
    n_rules = kept;
    char text[4096] = "";
    FILE *file = fopen(path, "r");
    if (!file) return;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    take_rules("STUB_FAULTS_FILE", text, true);
}

static void read_env(void) {
    if (!env_read) {
        env_read = true;
        const char *text = getenv("STUB_FAULTS");
        if (text) take_rules("STUB_FAULTS", text, false);
    }
    read_file();
}

/* Whether this process may do what a file's item asks for; its mark says to the next one that it was done. */
static bool claim(const struct rule *rule) {
    if (!rule->from_file) return true;
    bool once = rule->from && !rule->onward;
    char mark[PATH_MAX];
    snprintf(mark, sizeof mark, "%s.%s", getenv("STUB_FAULTS_FILE"), rule->text);
    int fd = open(mark, O_WRONLY | O_CREAT | (once ? O_EXCL : 0), 0600);
    if (fd < 0) return false;
    close(fd);
    return true;
}

static void act(const char *action) {
    if (!strcmp(action, "abort")) {
        fputs("/stub/ggml/src/ggml-backend.cpp:1: GGML_ASSERT(stub_was_asked_to_abort) failed\n", stderr);
        abort();
    } else if (!strcmp(action, "segv")) {
        raise(SIGSEGV);
    } else if (!strcmp(action, "kill")) {
        raise(SIGKILL);
    } else if (!strcmp(action, "stop")) {
        raise(SIGSTOP);
    } else if (!strcmp(action, "hang")) {
        pthread_mutex_lock(&lock);
        released = false;
        n_hanging++;
        pthread_cond_broadcast(&changed);
        while (!released) pthread_cond_wait(&changed, &lock);
        n_hanging--;
        pthread_mutex_unlock(&lock);
    }
}

const struct rule *stub_fault(const char *call, int mode) {
    const struct rule *found = NULL;
    pthread_mutex_lock(&lock);
    read_env();
    for (int i = 0; i < n_rules; i++) {
        struct rule *rule = &rules[i];
        if (strcmp(rule->call, call) || (rule->mode != MODE_ANY && mode != MODE_ANY && rule->mode != mode)) continue;
        rule->seen++;
        bool due = !rule->from || rule->seen == rule->from || (rule->onward && rule->seen > rule->from);
        if (due && !found && claim(rule)) found = rule;
    }
    pthread_mutex_unlock(&lock);
    if (found) {
        stub_note("fault call=%s action=%s", call, found->action);
        act(found->action);
    }
    return found;
}

bool stub_is(const struct rule *rule, const char *action) { return rule && !strcmp(rule->action, action); }

int64_t stub_setting(const char *call, const char *action, int64_t otherwise) {
    pthread_mutex_lock(&lock);
    read_env();
    for (int i = n_rules; i-- > 0;)
        if (!strcmp(rules[i].call, call) && !strcmp(rules[i].action, action)) {
            otherwise = rules[i].value;
            break;
        }
    pthread_mutex_unlock(&lock);
    return otherwise;
}

/* ---- counters ---- */

void stub_enter(struct context *context) {
    int now = __atomic_add_fetch(&context->inside, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&lock);
    if (now > max_inside) max_inside = now;
    pthread_mutex_unlock(&lock);
}

void stub_leave(struct context *context) { __atomic_sub_fetch(&context->inside, 1, __ATOMIC_SEQ_CST); }

static void live(const char *kind, int change) {
    char name[48];
    snprintf(name, sizeof name, "live_%s", kind);
    pthread_mutex_lock(&lock);
    *counter(name) += change;
    pthread_mutex_unlock(&lock);
}

void stub_born(const char *kind) { live(kind, 1); }
void stub_died(const char *kind) { live(kind, -1); }

int stub_next_id(const char *kind) {
    char name[48];
    snprintf(name, sizeof name, "made_%s", kind);
    pthread_mutex_lock(&lock);
    int id = (int) ++*counter(name);
    pthread_mutex_unlock(&lock);
    return id;
}

/* ---- exported: what a test uses ---- */

API bool stub_control(const char *text) {
    pthread_mutex_lock(&lock);
    read_env();
    bool good = add_rules(text, false);
    pthread_mutex_unlock(&lock);
    return good;
}

/* A copy of the log so far, one call a line; good until the next stub_calls of any thread. */
API const char *stub_calls(void) {
    static char *copy;
    pthread_mutex_lock(&lock);
    free(copy);
    copy = strdup(calls ? calls : "");
    pthread_mutex_unlock(&lock);
    return copy;
}

/* Forgets the log and the counters, but not the objects that live nor the faults. */
API void stub_reset(void) {
    pthread_mutex_lock(&lock);
    n_calls = 0;
    if (calls) *calls = 0;
    for (int i = 0; i < n_counters; i++)
        if (strncmp(counters[i].name, "live_", 5) && strncmp(counters[i].name, "made_", 5)) counters[i].n = 0;
    for (int i = 0; i < n_rules; i++) rules[i].seen = 0;
    max_inside = 0;
    pthread_mutex_unlock(&lock);
}

API int64_t stub_count(const char *name) {
    pthread_mutex_lock(&lock);
    int64_t n = *counter(name);
    pthread_mutex_unlock(&lock);
    return n;
}

API int stub_max_inside(void) { return max_inside; }
API const char *stub_id(void) { return STUB_ID; }

API void stub_release(void) {
    pthread_mutex_lock(&lock);
    released = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Returns when n threads hang in a fault. */
API void stub_wait_hanging(int n) {
    pthread_mutex_lock(&lock);
    while (n_hanging < n) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

struct storm { int n; };

static void *storm(void *argument) {
    int n = ((struct storm *) argument)->n;
    for (int i = 0; n < 0 || i < n; i++) {
        stub_say(LOG_INFO, "stub: message %d of a thread\n", i);
        if (i == 0) {
            pthread_mutex_lock(&lock);
            ++*counter("storm_threads");
            pthread_cond_broadcast(&changed);
            pthread_mutex_unlock(&lock);
        }
    }
    return NULL;
}

/* Logs n messages from each of n_threads threads; waits for them, or (n < 0) leaves them logging for ever. */
API void stub_storm(int n_threads, int n) {
    static struct storm what;
    pthread_t threads[64];
    what.n = n;
    if (n_threads > 64) n_threads = 64;
    for (int i = 0; i < n_threads; i++) pthread_create(&threads[i], NULL, storm, &what);
    if (n >= 0) {
        for (int i = 0; i < n_threads; i++) pthread_join(threads[i], NULL);
        return;
    }
    pthread_mutex_lock(&lock);
    while (*counter("storm_threads") < n_threads) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

API void llama_log_set(log_callback callback, void *user_data) {
    stub_note("llama_log_set callback=%s", callback ? "set" : "null");
    logger_data = user_data;
    logger = callback;
}
